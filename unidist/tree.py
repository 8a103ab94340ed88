"""Nested dicts, lists and tuples of values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any


def walk(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Each value of nested dicts, lists and tuples with the keys that lead to it.

    Dicts are visited in the order of sorted keys, which does not depend on the order in which each rank filled them.
    """
    if isinstance(tree, dict):
        for key in sorted_keys(tree):
            yield from walk(tree[key], (*path, key))
    elif isinstance(tree, (list, tuple)):
        for index, item in enumerate(tree):
            yield from walk(item, (*path, index))
    else:
        yield path, tree


def leaves(tree: Any) -> list[Any]:
    """The values alone."""
    return [leaf for _, leaf in walk(tree)]


def sorted_keys(tree: dict[Any, Any]) -> list[Any]:
    """A dict's keys in an order that is the same on every rank, for keys of any types."""
    return sorted(tree, key=lambda key: (type(key).__name__, repr(key)))


def map_leaves(fn: Callable[[Any], Any], tree: Any) -> Any:
    """The same structure with ``fn`` of each value, visited in the order of ``walk``."""
    if isinstance(tree, dict):
        done = {key: map_leaves(fn, tree[key]) for key in sorted_keys(tree)}
        return {key: done[key] for key in tree}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map_leaves(fn, item) for item in tree))
    if isinstance(tree, (list, tuple)):
        return type(tree)(map_leaves(fn, item) for item in tree)
    return fn(tree)
