"""Tensors of which each rank has a shard, in a directory of torch.distributed.checkpoint."""

from __future__ import annotations

import hashlib
import io
import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch

METADATA = ".metadata"
#: The classes of torch.distributed.checkpoint in an index of tensors.
_CLASSES = (
    "Metadata", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata", "MetadataIndex", "StorageMeta",
    "_StorageInfo",
)  # fmt: skip


def is_sharded(value: object) -> bool:
    """Return whether it is a DTensor."""
    return isinstance(value, torch.Tensor) and hasattr(value, "device_mesh") and hasattr(value, "placements")


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor."""
    part: torch.Tensor = tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
    return part


def save(tensors: Mapping[str, torch.Tensor], directory: Path) -> None:
    """Write the shards of all ranks, each only once. Collective over torch's default process group."""
    from torch.distributed import checkpoint

    with _errors():
        checkpoint.save(dict(tensors), storage_writer=checkpoint.FileSystemWriter(directory))


def digest(directory: Path) -> str:
    """Return the digest of a directory's index. Raises ``FileNotFoundError`` if this rank does not see all files."""
    _read_index(directory, None)
    return hashlib.sha256((directory / METADATA).read_bytes()).hexdigest()


def load(
    tensors: Mapping[str, torch.Tensor], directory: Path, digest: str | None, verify: Callable[[IO[bytes]], None]
) -> None:
    """Fill tensors, sharded in any way or not, with the saved ones of their names. Not collective: each rank reads its
    part.

    Args:
        tensors: those to fill.
        directory: as ``save`` has left it.
        digest: that of the index when it was saved, or None.
        verify: raises if a file of ``torch.save`` is damaged.
    """
    from torch.distributed import checkpoint

    class Reader(checkpoint.FileSystemReader):
        def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
            return index

        def read_data(self, plan: Any, planner: Any) -> Any:
            for item in plan.items:
                stored = index.storage_data[item.storage_index]
                with open(directory / stored.relative_path, "rb") as file:
                    file.seek(stored.offset)
                    verify(io.BytesIO(file.read(stored.length)))
            try:
                return super().read_data(plan, planner)
            except (RuntimeError, pickle.UnpicklingError, EOFError) as error:
                raise ValueError("a shard is damaged or not of torch.save; load an earlier checkpoint") from error

    index = _read_index(directory, digest)
    with warnings.catch_warnings(), _errors():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # what no_dist asks for
        checkpoint.load(dict(tensors), storage_reader=Reader(directory), no_dist=True)


def _read_index(directory: Path, digest: str | None) -> Any:
    """Return which tensors are where, as a ``Metadata`` of torch.distributed.checkpoint."""
    from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

    data = (directory / METADATA).read_bytes()
    if digest not in (None, hashlib.sha256(data).hexdigest()):
        raise ValueError(f"{METADATA} in it does not have its checksum; load an earlier checkpoint")
    try:
        index = _Unpickler(io.BytesIO(data)).load()
        stored = {MetadataIndex(key.fqn, key.offset, key.index): info for key, info in index.storage_data.items()}
        # Other kinds of values are pickled.
        tensors = [isinstance(value, TensorStorageMetadata) for value in index.state_dict_metadata.values()]
        encoded = [getattr(info, "transform_descriptors", None) for info in stored.values()]
        names = {info.relative_path for info in stored.values()}
        elsewhere = [name for name in names if Path(name).name != name]
        if not isinstance(index, Metadata) or not all(tensors) or any(encoded) or elsewhere:
            raise TypeError("it is no index of tensors in this directory")
    except Exception as error:  # of any kind, in a pickle that is damaged or hostile
        raise ValueError(f"{METADATA} in it is refused: {type(error).__name__}: {error}") from error
    if missing := sorted(name for name in names if not (directory / name).is_file()):
        raise FileNotFoundError(f"{missing} are missing: the directory must be on a file system of all hosts")
    index.storage_data = stored
    return index


class _Unpickler(pickle.Unpickler):
    """Nothing but indexes of tensors: a pickle may call what it finds here, and set attributes of it."""

    def find_class(self, module: str, name: str) -> Any:
        from torch.distributed.checkpoint import filesystem, metadata

        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) == ("torch", "Size"):
            return torch.Size
        if (module, name) == ("torch.serialization", "_get_layout"):
            return lambda layout: torch.strided
        if name == "_MEM_FORMAT_ENCODING" and module == metadata.__name__:
            return lambda value: metadata._MEM_FORMAT_ENCODING(value)
        if (module, name) == ("builtins", "getattr"):  # how the first releases of Python 3.11 pickle members of an enum
            return lambda _, member: metadata._MEM_FORMAT_ENCODING[member]
        if module.startswith("pathlib") and name in ("PosixPath", "WindowsPath"):  # where it was saved
            return lambda *parts: None
        if name in _CLASSES and module in (metadata.__name__, filesystem.__name__):
            return type(name, (super().find_class(module, name),), {})
        raise pickle.UnpicklingError(f"it contains a {module}.{name}")


@contextmanager
def _errors() -> Iterator[None]:
    """Raise an ``Exception`` for torch's ``CheckpointException``, which is none."""
    from torch.distributed.checkpoint import CheckpointException

    try:
        yield
    except CheckpointException as error:
        reasons = dict.fromkeys(f"{type(why[0]).__name__}: {why[0]}" for why in error.failures.values())
        raise OSError("; ".join(reasons)) from error
