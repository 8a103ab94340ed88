"""Where nodes begin in the text of their module."""

from __future__ import annotations

import re
from array import array
from bisect import bisect_right
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate

import libcst as cst
from libcst._nodes.internal import CodegenState

_NEWLINE = re.compile(r"\r\n?|\n")
_NOTHING = nullcontext()


class Positions:
    """Lines and columns, as libcst's ``PositionProvider`` has them, by the indices of a tree's nodes.

    The provider makes three objects for each node, and counts the lines of each token.
    """

    def __init__(self, module: cst.Module, indices: Mapping[int, int]) -> None:
        state = _State(module, indices)
        module._codegen(state)
        self._tokens, self._hoisted = state.first_tokens, state.hoisted
        self._offsets = array("l", accumulate(map(len, state.tokens), initial=0))
        self._lines = array("l", [0, *(match.end() for match in _NEWLINE.finditer("".join(state.tokens)))])

    def of(self, index: int) -> tuple[int, int]:
        """The line, from 1, and the column, from 0, at which a node begins."""
        index = self._hoisted.get(index, index)
        offset = self._offsets[min(self._tokens[index], len(self._offsets) - 1)]
        line = bisect_right(self._lines, offset)
        return line, offset - self._lines[line - 1]


class _State(CodegenState):
    """Notes at which token each node begins while libcst writes the module."""

    def __init__(self, module: cst.Module, indices: Mapping[int, int]) -> None:
        super().__init__(module.default_indent, module.default_newline)
        self._indices = indices
        self.first_tokens = array("l", bytes(array("l").itemsize * len(indices)))
        #: Nodes that begin where one of their descendants does.
        self.hoisted: dict[int, int] = {}

    def before_codegen(self, node: cst.CSTNode) -> None:
        index = self._indices.get(id(node))
        if index is not None:
            self.first_tokens[index] = len(self.tokens)

    def record_syntactic_position(  # type: ignore[override]  # a context manager that does nothing
        self, node: cst.CSTNode, *, start_node: cst.CSTNode | None = None, end_node: cst.CSTNode | None = None
    ) -> AbstractContextManager[None]:
        index = self._indices.get(id(node))
        if index is not None:
            self.first_tokens[index] = len(self.tokens)
            if start_node is not None:
                self.hoisted[index] = self._indices[id(start_node)]
        return _NOTHING
