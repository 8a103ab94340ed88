"""A DataLoader's share for this rank."""

from unidist.data.loader import ShardLoader, shard_loader
from unidist.data.sampler import ShardSampler
from unidist.data.stream import ShardStream

__all__ = ["ShardLoader", "ShardSampler", "ShardStream", "shard_loader"]
