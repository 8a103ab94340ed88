"""Tensors of which each rank has a shard, in a directory of torch.distributed.checkpoint."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

METADATA = ".metadata"


def is_sharded(value: object) -> bool:
    """Whether it is a DTensor."""
    return isinstance(value, torch.Tensor) and hasattr(value, "device_mesh") and hasattr(value, "placements")


def save(tensors: Mapping[str, torch.Tensor], directory: Path) -> None:
    """Write the shards of all ranks, each only once. Collective over torch's default process group."""
    from torch.distributed import checkpoint

    with _errors():
        checkpoint.save(dict(tensors), storage_writer=checkpoint.FileSystemWriter(directory))


def missing_files(directory: Path) -> list[str]:
    """The files that a saved directory should have and does not."""
    from torch.distributed import checkpoint

    stored = checkpoint.FileSystemReader(directory).read_metadata().storage_data or {}
    return sorted({info.relative_path for info in stored.values() if not (directory / info.relative_path).exists()})


def load(tensors: Mapping[str, torch.Tensor], directory: Path) -> None:
    """Fill tensors, sharded in any way or not, with the saved ones of their names. Not collective: each rank reads its
    part.
    """
    from torch.distributed import checkpoint

    with warnings.catch_warnings(), _errors():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # what no_dist asks for
        checkpoint.load(dict(tensors), storage_reader=checkpoint.FileSystemReader(directory), no_dist=True)


@contextmanager
def _errors() -> Iterator[None]:
    """torch's ``CheckpointException`` is no ``Exception``."""
    from torch.distributed.checkpoint import CheckpointException

    try:
        yield
    except CheckpointException as error:
        reasons = dict.fromkeys(f"{type(why[0]).__name__}: {why[0]}" for why in error.failures.values())
        raise OSError("; ".join(reasons)) from error
