"""Nested dicts, lists and tuples, and the tensors in them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import copy
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor
from torch.distributions import Distribution
from torch.nn import Module

#: What is looked into as an attribute.
_HOLD_TENSORS = (Tensor, Mapping, list, tuple, Distribution)


def walk(tree: Any) -> list[tuple[tuple[Any, ...], Any]]:
    """Return each value of nested dicts, lists and tuples with the keys that lead to it.

    Dicts are visited in the order of sorted keys, which does not depend on the order in which each rank filled them.
    """
    found: list[tuple[tuple[Any, ...], Any]] = []
    _walk(tree, (), found)
    return found


def _walk(tree: Any, path: tuple[Any, ...], found: list[tuple[tuple[Any, ...], Any]]) -> None:
    if isinstance(tree, dict):
        for key in sorted_keys(tree):
            _walk(tree[key], (*path, key), found)
    elif isinstance(tree, (list, tuple)):
        for index, item in enumerate(tree):
            _walk(item, (*path, index), found)
    else:
        found.append((path, tree))


def sorted_keys(tree: dict[Any, Any]) -> list[Any]:
    """Return a dict's keys in an order that is the same on every rank, for keys of any types."""
    if all(type(key) is str for key in tree):
        return sorted(tree)
    return sorted(tree, key=lambda key: (type(key).__name__, repr(key)))


def map_leaves(fn: Callable[[Any], Any], tree: Any) -> Any:
    """Return the same structure with ``fn`` of each value, visited in the order of ``walk``."""
    if isinstance(tree, dict):
        done = {key: map_leaves(fn, tree[key]) for key in sorted_keys(tree)}
        same = copy(tree)  # an OrderedDict, a dict with attributes
        for key in tree:
            same[key] = done[key]
        return same
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map_leaves(fn, item) for item in tree))
    if isinstance(tree, (list, tuple)):
        return type(tree)(map_leaves(fn, item) for item in tree)
    return fn(tree)


def tensors_in(output: Any) -> Iterator[Tensor]:
    """Yield the tensors of a model's output: a tensor, or dicts, lists, tuples, dataclasses and distributions of them.

    Of another object, its attributes are looked at, and not those of its attributes, which may be anything.
    """
    yield from _tensors_in(output, set())


def tensors_with_gradient(output: Any) -> list[Tensor]:
    """Return those that require grad."""
    return [tensor for tensor in tensors_in(output) if tensor.requires_grad]


def _tensors_in(output: Any, seen: set[int]) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif id(output) not in seen:  # objects may refer to each other
        seen.add(id(output))
        for part in _parts(output):
            yield from _tensors_in(part, seen)


def _parts(output: Any) -> Iterable[Any]:
    """Return what a model's output consists of: items, or attributes that may hold tensors."""
    if isinstance(output, Mapping):
        return output.values()
    if isinstance(output, (list, tuple)):
        return output
    if isinstance(output, (type, Module)):
        return ()
    attributes = dict(getattr(output, "__dict__", {}))
    if is_dataclass(output):  # its slots
        attributes.update((each.name, getattr(output, each.name, None)) for each in fields(output))
    return [each for each in attributes.values() if isinstance(each, _HOLD_TENSORS) or is_dataclass(each)]


def is_lazy_view(tensor: Tensor) -> bool:
    """Return whether the memory has other values than the tensor: as of ``x.conj()``, and of ``x.conj().imag``."""
    return tensor.is_conj() or tensor.is_neg()
