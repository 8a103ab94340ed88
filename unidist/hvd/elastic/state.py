"""``horovod.torch.elastic.state``."""

from unidist.elastic.state import TorchState

__all__ = ["TorchState"]
