"""Printing, logging and progress bars on rank 0."""

from __future__ import annotations

import builtins
import logging
from collections.abc import Iterable, Iterator, MutableMapping
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor

from unidist.context import is_initialized, is_main, rank, world_size
from unidist.tree import tensors_in

if TYPE_CHECKING:
    from tqdm import tqdm

T = TypeVar("T")


def print(*values: object, **options: Any) -> None:
    """Python's ``print`` on rank 0, at once; nothing on the others. Not collective.

    Before ``init()`` every process prints.
    """
    if not is_initialized() or is_main():
        builtins.print(*values, **{"flush": True, **options})


class RankFilter(logging.Filter):
    """Passes all records on rank 0, and those of ``level`` and above on every rank; adds the attribute ``rank`` to
    records.

    ::

        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("[rank %(rank)s] %(message)s"))
        handler.addFilter(unidist.RankFilter())
        logging.basicConfig(level=logging.INFO, handlers=[handler])

    On a handler it filters the records of all loggers, on a logger only its own. Before ``init()`` every process is
    rank 0.

    Args:
        level: the level from which on records of all ranks pass (default: WARNING).
    """

    def __init__(self, level: int = logging.WARNING) -> None:
        super().__init__()
        self.level = level

    def filter(self, record: logging.LogRecord) -> bool:
        record_rank = vars(record)["rank"] = rank() if is_initialized() else 0
        return record_rank == 0 or record.levelno >= self.level


def progress(iterable: Iterable[T], **options: Any) -> tqdm[T]:
    """Iterate over batches with a tqdm bar on rank 0 that shows the samples per second of all ranks. Not collective.

    The samples of a batch are the first dimension of its first tensor; all ranks are assumed to be as fast as rank 0.

    Args:
        iterable: a ``shard_loader``'s result, or anything else.
        options: passed to ``tqdm``: ``desc``, ``total``, ``leave``, ``disable``, ...

    Returns:
        A ``tqdm`` (``set_postfix``, ``write``, ...), disabled on other ranks.

    Raises:
        ImportError: tqdm is not installed: ``pip install "unidist-torch[progress]"``.
    """
    try:
        from tqdm.auto import tqdm
    except ImportError as error:
        raise ImportError('unidist.progress needs tqdm: pip install "unidist-torch[progress]".') from error

    class Bar(tqdm):  # type: ignore[type-arg]  # generic in type stubs only
        samples = 0

        def __iter__(self) -> Iterator[T]:
            for batch in super().__iter__():
                yield batch  # counted after its step
                self.samples += _samples(batch) * ranks

        @property
        def format_dict(self) -> MutableMapping[str, Any]:
            values = super().format_dict
            if self.samples and values["elapsed"]:
                speed = f"{self.samples / values['elapsed']:.4g} samples/s"
                values["postfix"] = f"{speed}, {values['postfix']}" if values["postfix"] else speed
            return values

    options.setdefault("total", _length(iterable))
    ranks = world_size() if is_initialized() else 1
    if is_initialized() and not is_main():
        options["disable"] = True
    return Bar(iterable, **options)


def _length(iterable: Any) -> int | None:
    try:
        return len(iterable)
    except TypeError:
        return None


def _samples(batch: Any) -> int:
    first: Tensor | None = next(iter(tensors_in(batch)), None)
    return first.shape[0] if first is not None and first.dim() else 1
