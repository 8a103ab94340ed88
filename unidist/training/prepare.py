"""Everything that a training needs, made data-parallel in one call."""

from __future__ import annotations

from typing import Any, TypeVar, overload

from torch import nn
from torch.utils.data import DataLoader

from unidist.context import device
from unidist.data import shard_loader
from unidist.training.model import wrap_model

T = TypeVar("T")
#: Values that can be iterated over, and are settings rather than data.
_SETTINGS = (str, bytes, dict)


@overload
def prepare(first: T, /) -> T: ...
@overload
def prepare(first: Any, second: Any, /, *others: Any) -> tuple[Any, ...]: ...
def prepare(*objects: Any) -> Any:
    """Return models, optimizers and loaders, ready for training on all ranks: one call in place of three. Collective.

    A model moves to ``unidist.device()`` and goes through ``wrap_model``, or only moves if no parameter of it requires
    grad; a ``DataLoader`` goes through ``shard_loader``. Both with their defaults: call them yourself for options, such
    as ``shard_loader(test, pad=False)``, which counts each sample of a test set once. Optimizers, schedulers and
    whatever else has no items, and strings and dicts, are returned as they are. An optimizer may be made before or
    after. ::

        model, optimizer, train = unidist.prepare(model, optimizer, train)

    Args:
        objects: in the same order on every rank.

    Returns:
        A tuple in the order of the arguments; for one argument, the result itself.

    Raises:
        TypeError: data that is in no ``DataLoader``: a dataset, a list, a tensor, webdataset's ``WebLoader``.
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
    has_items = hasattr(type(value), "__iter__") or hasattr(type(value), "__getitem__")
    if has_items and not isinstance(value, _SETTINGS):
        raise TypeError(
            f"prepare cannot shard this {type(value).__name__}, which is no torch.utils.data.DataLoader: every rank "
            "would read all of it. Pass models, optimizers, schedulers and DataLoaders, each by itself, and leave out "
            "data that splits itself by rank."
        )
    return value
