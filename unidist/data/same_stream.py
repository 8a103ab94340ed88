"""Datasets that are split already: those that are known to be, and streams that differ between ranks or workers."""

from __future__ import annotations

import copy
import ctypes
import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Subset, TensorDataset
from torch.utils.data._utils import worker as torch_worker

from unidist.data.sampler import seeded
from unidist.tree import walk

#: Of a stream, the first samples, and of each the first leaves, that are compared.
_SAMPLES, _LEAVES = 4, 16
#: Attributes in which datasets keep other ones.
_INNER = ("dataset", "datasets", "pipeline", "source", "source_datapipe", "_dataset")
_DEPTH, _PARTS = 6, 64
#: Datasets that hold their items.
ITEMS = (TensorDataset, list, tuple)
#: Of a ``Subset``, the indices that are compared.
_INDICES = 1000


def own_split(dataset: object, depth: int = _DEPTH) -> str:
    """Return what in a dataset divides it among the ranks, such as ``split_by_node``; empty if nothing is known to."""
    if getattr(dataset, "_distributed", None):
        return "split_dataset_by_node"
    if getattr(getattr(dataset, "func", dataset), "__name__", "") == "split_by_node":
        return "split_by_node"
    for name, size in (("distributed_env", "world_size"), ("_unique_rank_world", "num_ranks")):
        if getattr(getattr(dataset, name, None), size, 1) > 1:
            return f"{type(dataset).__module__.partition('.')[0]}'s {type(dataset).__name__}"
    parts: Sequence[Any] = ()
    if isinstance(dataset, (list, tuple)):
        parts = dataset[:_PARTS]
    elif hasattr(dataset, "__dict__"):
        parts = [vars(dataset).get(name) for name in _INNER]
    found = (own_split(part, depth - 1) for part in parts if depth and part is not None)
    return next(filter(None, found), "")


def empty_table(workers: int) -> Tensor:
    """Return for each worker a row of digests for each of the first samples; 0 where there is none."""
    return torch.zeros(max(workers, 1), _SAMPLES, _LEAVES, dtype=torch.int64)


def recorded(samples: Iterator[Any], table: Tensor) -> Iterator[Any]:
    """Yield the samples, of which the first ones are written into a worker's table."""
    for row in table:
        try:
            sample = next(samples)
        except StopIteration:
            return
        row.copy_(_row(sample))
        yield sample
    yield from samples


def first_samples(dataset: Any, workers: int, worker: int = 0) -> Tensor | None:
    """Return the table of a stream that is read once more, in this process, as a worker reads it, with fixed seeds.

    It is zeros where the stream cannot be repeated: it has no samples then, or others, or reads on from where it is.
    None where that fails, as without what a ``worker_init_fn`` does.
    """
    tables = empty_table(2)
    if any(map(_reads_on, (dataset, *getattr(dataset, "__dict__", {}).values()))):
        return tables[0]
    for table in tables:
        try:
            again = copy.copy(dataset)
            with seeded(None, 0), _as_worker(again, workers, worker):
                for _ in islice(recorded(iter(again), table), _SAMPLES):
                    pass
        except Exception:
            return None
    return tables[0] * bool((tables[0] == tables[1]).all())


def _reads_on(part: Any) -> bool:
    """Return whether it is an iterator, or a file that is read."""
    return hasattr(part, "__next__") and (not hasattr(part, "readable") or part.readable())


def fingerprint(dataset: Any) -> str | None:
    """Return what is compared of a map-style dataset at first; None of one without a length.

    Of Hugging Face's its own fingerprint, of a ``Subset`` the first indices, of tensors and lists the first and last
    item. To read an item of others may open files, which worker processes must not share: of these the length alone.
    """
    if hasattr(dataset, "_fingerprint") and hasattr(dataset, "with_format"):
        return str(dataset._fingerprint)
    if not hasattr(dataset, "__len__"):
        return None
    return str(first_rows(dataset))


def first_rows(dataset: Any) -> list[Any]:
    """Return what tells shards of a map-style dataset apart: its length, rows without transforms or their numbers."""
    if isinstance(dataset, Subset):
        return [len(dataset), [str(i) for i in islice(dataset.indices, _INDICES)]]
    if isinstance(dataset, ITEMS):
        with seeded(None, 0):  # a subclass may augment them
            return [len(dataset), [_row(dataset[i]).tolist() for i in (0, len(dataset) - 1) if len(dataset)]]
    if not hasattr(dataset, "with_format"):
        return [len(dataset)]
    rows = dataset.with_format("arrow")
    return [len(dataset), *(repr(rows[i : i + 1].to_pydict()) for i in (0, len(dataset) - 1) if len(dataset))]


def differ(tables: Tensor) -> bool:
    """Return whether tables, of shape (tables, samples, leaves), are of different streams.

    Samples may be augmented by random numbers. So streams are the same where one leaf of the samples, such as the
    label, is; leaves that are the same in all samples do not count.
    """
    counts = (tables != 0).any(2).sum(1)
    rows = tables[:, : int(counts.min())]
    if rows.shape[1] == 0:
        return bool(counts.max() > 0)
    leaves = rows.transpose(0, 2).transpose(1, 2)[(rows != 0).flatten(0, 1).all(0)]
    varying = leaves[(leaves != leaves[:, :1, :1]).flatten(1).any(1)]
    return len(varying) > 0 and not bool((varying == varying[:, :1]).flatten(1).all(1).any())


def _row(sample: Any) -> Tensor:
    leaves = [leaf for _, leaf in walk(sample)][:_LEAVES]
    return torch.tensor([_digest(leaf) for leaf in leaves] + [0] * (_LEAVES - len(leaves)))


def _digest(leaf: Any) -> int:
    """63 bits of a number, a text, a tensor, an array or an image; 1 for all others, which are not compared."""
    if isinstance(leaf, Tensor) and leaf.layout == torch.strided and not leaf.is_meta:
        dense = leaf.detach().cpu().contiguous()
        data = ctypes.string_at(dense.data_ptr(), dense.nbytes) if dense.nbytes else b""
    elif hasattr(leaf, "tobytes"):
        data = leaf.tobytes()
    elif isinstance(leaf, (bool, int, float, str, bytes)):
        data = repr(leaf).encode()
    else:
        return 1
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") >> 1 | 2


@contextmanager
def _as_worker(dataset: Any, workers: int, worker: int) -> Iterator[None]:
    """Inside, ``get_worker_info()`` is a worker's."""
    before = torch_worker._worker_info
    if workers:
        torch_worker._worker_info = torch_worker.WorkerInfo(id=worker, num_workers=workers, seed=0, dataset=dataset)
    try:
        yield
    finally:
        torch_worker._worker_info = before
