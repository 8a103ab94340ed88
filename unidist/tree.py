"""Nested dicts, lists and tuples of values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def leaves(tree: Any) -> list[Any]:
    """The values of nested dicts (in the order of sorted keys), lists and tuples."""
    found: list[Any] = []
    map_leaves(found.append, tree)
    return found


def map_leaves(fn: Callable[[Any], Any], tree: Any) -> Any:
    """The same structure with ``fn`` of each value, visited in the order of ``leaves``.

    Dicts are visited in the order of sorted keys, which does not depend on the order in which each rank
    filled them, and keep their own order.
    """
    if isinstance(tree, dict):
        done = {key: map_leaves(fn, tree[key]) for key in sorted(tree, key=lambda key: (type(key).__name__, repr(key)))}
        return {key: done[key] for key in tree}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map_leaves(fn, item) for item in tree))
    if isinstance(tree, (list, tuple)):
        return type(tree)(map_leaves(fn, item) for item in tree)
    return fn(tree)
