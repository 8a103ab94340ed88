"""Nested dicts, lists and tuples, and the tensors in them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor


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
    """Yield the tensors of a model's output: a tensor, or dicts, lists, tuples and dataclasses of them."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from tensors_in(value)
    elif isinstance(output, (list, tuple)):
        for value in output:
            yield from tensors_in(value)
    elif is_dataclass(output) and not isinstance(output, type):
        declared = {each.name: getattr(output, each.name, None) for each in fields(output)}  # with slots, not in vars
        yield from tensors_in({**declared, **getattr(output, "__dict__", {})})


def is_lazy_view(tensor: Tensor) -> bool:
    """Return whether the memory has other values than the tensor: as of ``x.conj()``, and of ``x.conj().imag``."""
    return tensor.is_conj() or tensor.is_neg()
