"""Everything that a training needs, made data-parallel in one call."""

from __future__ import annotations

from typing import Any, TypeVar, overload

from torch import Tensor, nn
from torch.utils.data import DataLoader

from unidist.context import device
from unidist.data import shard_loader
from unidist.training.model import wrap_model

T = TypeVar("T")
_CONTAINERS = (str, bytes, dict, list, tuple, set)


@overload
def prepare(first: T, /) -> T: ...
@overload
def prepare(first: Any, second: Any, /, *others: Any) -> tuple[Any, ...]: ...
def prepare(*objects: Any) -> Any:
    """Return models, optimizers and loaders, ready for training on all ranks: one call in place of three. Collective.

    A model moves to ``unidist.device()`` and goes through ``wrap_model``, or only moves if no parameter of it requires
    grad; a ``DataLoader`` goes through ``shard_loader``. Both with their defaults: call them yourself for options, such
    as ``shard_loader(test, pad=False)``, which counts each sample of a test set once. Everything else, such as
    optimizers and schedulers, is returned as it is. An optimizer may be made before or after. ::

        model, optimizer, train = unidist.prepare(model, optimizer, train)

    Args:
        objects: in the same order on every rank.

    Returns:
        A tuple in the order of the arguments; for one argument, the result itself.

    Raises:
        TypeError: a dataset or a loader that is no ``DataLoader``, such as webdataset's ``WebLoader``.
        What ``wrap_model`` and ``shard_loader`` raise.
    """
    prepared = tuple(_prepared(each) for each in objects)
    return prepared[0] if len(prepared) == 1 else prepared


def _prepared(value: Any) -> Any:
    if isinstance(value, nn.Module):
        value = value.to(device())
        return wrap_model(value) if any(p.requires_grad for p in value.parameters()) else value
    if isinstance(value, DataLoader):
        return shard_loader(value)
    if hasattr(type(value), "__iter__") and not isinstance(value, (*_CONTAINERS, Tensor)):
        raise TypeError(
            f"prepare cannot shard this {type(value).__name__}, which is no torch.utils.data.DataLoader: every rank "
            "would read all of it. Pass a DataLoader of its dataset, or let the dataset split itself by rank and leave "
            "it out."
        )
    return value
