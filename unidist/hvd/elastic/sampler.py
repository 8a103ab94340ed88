"""``horovod.torch.elastic.sampler``."""

from unidist.elastic.sampler import ElasticSampler

__all__ = ["ElasticSampler"]
