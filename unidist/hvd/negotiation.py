"""Which operations may begin, in which order: what rank 0 decides for all.

Each rank tells which operations it is ready for, in any order. When all ranks of an operation's process set are ready, and
agree on it, it is answered to all of them; the answers come in one order everywhere, so that nobody waits for nobody. Small
sums that become ready together are answered as one. No thread, clock or socket here: see ``line`` for those.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch

#: What a rank says of an operation's tensors that may differ between ranks: rows of each, or splits.
Own = tuple[int, ...]


class Form(NamedTuple):
    """What all ranks of an operation must agree on."""

    kind: str
    #: One entry for each tensor; rows that may differ are -1.
    dtypes: tuple[str, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()
    op: str = ""
    root: int = -1
    prescale: float = 1.0
    postscale: float = 1.0
    device: str = "cpu"
    #: Of a process set that is made or removed: its ranks.
    ranks: tuple[int, ...] = ()


class Request(NamedTuple):
    """A rank is ready for an operation."""

    set_id: int
    #: Unlike all that are under way in the process set.
    name: str
    form: Form
    own: Own = ()


class Answer(NamedTuple):
    """Operations of one process set that begin now, as one."""

    set_id: int
    names: tuple[str, ...]
    #: The first operation's; each one's while somebody has joined, who knows of none.
    forms: tuple[Form, ...]
    #: What each rank of the set said, where it may differ.
    table: tuple[Own, ...] = ()
    #: The ranks did not agree, or one is missing for good.
    error: str = ""
    #: Of a new process set, its number; of a join, the last rank.
    number: int = -1


#: Answers, with the ranks that are to hear of them.
Deliveries = list[tuple[tuple[int, ...], Answer]]


class _Entry:
    def __init__(self, request: Request, since: float) -> None:
        self.request = request
        self.since = since
        self.forms: dict[int, Form] = {}
        self.own: dict[int, Own] = {}


class Coordinator:
    """The state of the negotiation of one world.

    Args:
        size: number of ranks.
        fusion: bytes up to which sums are answered as one.
    """

    def __init__(self, size: int, fusion: int) -> None:
        self.sets: dict[int, tuple[int, ...]] = {0: tuple(range(size))}
        self._next_set = 1
        self._fusion = fusion
        self._waiting: dict[tuple[int, str], _Entry] = {}
        self._ready: list[_Entry] = []
        self._failed: Deliveries = []
        #: Ranks that have joined, in order.
        self.joined: list[int] = []
        #: Why nothing can begin any more.
        self.end = ""

    # -------------------------------------------------------------------------------- what ranks say
    def receive(self, rank: int, requests: Iterable[Request], now: float) -> None:
        """A rank is ready for operations."""
        for request in requests:
            if self.end or request.set_id not in self.sets:
                why = self.end or f"process set {request.set_id} has been removed"
                self._failed.append(
                    (
                        (rank,),
                        Answer(
                            request.set_id,
                            (request.name,),
                            (request.form,),
                            error=f"{_called(request.form, request.name)}: {why}",
                        ),
                    )
                )
                continue
            key = (request.set_id, request.name)
            entry = self._waiting.get(key)
            if entry is None:
                entry = self._waiting[key] = _Entry(request, now)
            entry.forms[rank] = request.form
            entry.own[rank] = request.own
            self._check(key, entry)

    def join(self, rank: int) -> None:
        """A rank has no more data: it takes part in sums with nothing until all have joined."""
        self.joined.append(rank)
        for key, entry in list(self._waiting.items()):
            self._check(key, entry)

    def lose(self, rank: int, why: str) -> None:
        """A rank is gone: what waits, and what will come, fails."""
        if not self.end:
            self.end = f"rank {rank} {why}"
            self.fail_all(self.end)

    def fail_all(self, why: str) -> None:
        """Answer all that waits with an error."""
        for (set_id, name), entry in self._waiting.items():
            there = tuple(entry.forms)
            self._failed.append(
                (
                    there,
                    Answer(set_id, (name,), (entry.request.form,), error=f"{_called(entry.request.form, name)}: {why}"),
                )
            )
        self._waiting.clear()

    # -------------------------------------------------------------------------------- what they are told
    def answers(self) -> Deliveries:
        """What has become ready since the last call, with the ranks that are to hear of it."""
        told, self._failed = self._failed, []
        for entries in self._fused():
            told.append(self._answer(entries))
        everybody = self.sets[0]
        if self.joined and len(self.joined) == len(everybody):
            told.append((everybody, Answer(0, (), (), number=self.joined[-1])))
            self.joined = []
        return told

    def stalled(self, now: float, seconds: float) -> list[tuple[str, float, list[int], list[int]]]:
        """Operations that some ranks have waited for at least so long: name, seconds, ranks that wait, ranks that are missing."""
        found = []
        for (set_id, name), entry in self._waiting.items():
            if now - entry.since >= seconds:
                missing = [rank for rank in self.sets[set_id] if rank not in entry.forms]
                found.append((_called(entry.request.form, name), now - entry.since, sorted(entry.forms), missing))
        return found

    # --------------------------------------------------------------------------------
    def _check(self, key: tuple[int, str], entry: _Entry) -> None:
        ranks = self.sets[key[0]]
        there = len(entry.forms)
        if there < len(ranks) and (
            not self.joined
            or there + sum(rank in ranks and rank not in entry.forms for rank in self.joined) < len(ranks)
        ):
            return
        del self._waiting[key]
        error = self._disagreement(entry)
        if error:
            set_id, name, form, _ = entry.request
            self._failed.append((tuple(entry.forms), Answer(set_id, (name,), (form,), error=error)))
        else:
            self._ready.append(entry)

    def _fused(self) -> list[list[_Entry]]:
        ready, self._ready = self._ready, []
        if len(ready) < 2:
            return [[entry] for entry in ready]
        groups: list[list[_Entry]] = []
        open_groups: dict[tuple[object, ...], tuple[list[_Entry], int]] = {}
        for entry in ready:
            set_id, _, form, _ = entry.request
            if form.kind not in ("allreduce", "broadcast") or form.op == "adasum" or len(set(form.dtypes)) != 1:
                groups.append([entry])
                continue
            kind = (set_id, form.kind, form.dtypes[0], form.op, form.root, form.prescale, form.postscale, form.device)
            nbytes = size_of(form)
            group, filled = open_groups.get(kind, ([], 0))
            if not group or filled + nbytes > self._fusion:
                group, filled = [], 0
                groups.append(group)
            group.append(entry)
            open_groups[kind] = (group, filled + nbytes)
        return groups

    def _answer(self, entries: list[_Entry]) -> tuple[tuple[int, ...], Answer]:
        first = entries[0].request
        ranks = self.sets[first.set_id]
        number = -1
        if first.form.kind == "add_process_set":
            number, self._next_set = self._next_set, self._next_set + 1
            self.sets[number] = first.form.ranks
        elif first.form.kind == "remove_process_set":
            self.sets.pop(first.form.root, None)
        table = tuple(entries[0].own[rank] for rank in ranks) if first.own else ()
        names = tuple(entry.request.name for entry in entries)
        forms = tuple(entry.request.form for entry in entries) if self.joined else (first.form,)
        return ranks, Answer(first.set_id, names, forms, table, number=number)

    def _disagreement(self, entry: _Entry) -> str:
        forms = entry.forms
        set_id, name, first, _ = entry.request
        if any(form != first for form in forms.values()):
            return f"{_called(first, name)}: {_difference(forms)}"
        absent = [rank for rank in self.sets[set_id] if rank not in forms]
        if absent and (first.kind != "allreduce" or first.op == "adasum"):
            hint = " (with sparse gradients: sparse_as_dense=True)" if first.kind == "allgather" else ""
            return f"{_called(first, name)}: {first.kind} is not supported while ranks {told(absent)} have joined{hint}"
        return ""


def size_of(form: Form) -> int:
    """Bytes of an operation's tensors on one rank."""
    return sum(math.prod(shape) * getattr(torch, dtype).itemsize for dtype, shape in zip(form.dtypes, form.shapes))


def told(ranks: Sequence[int]) -> str:
    """Ranks for a message."""
    shown = ", ".join(map(str, ranks[:8]))
    return f"{shown}, ... ({len(ranks)} in all)" if len(ranks) > 8 else shown


_ASPECTS: dict[str, tuple[str, Callable[[Form], object]]] = {
    "kind": ("operations", lambda form: form.kind),
    "ranks": ("process sets", lambda form: list(form.ranks)),
    "dtypes": ("data types", lambda form: ", ".join(form.dtypes)),
    "shapes": ("tensor shapes", lambda form: ", ".join(_shape(shape) for shape in form.shapes)),
    "op": ("reduction operations", lambda form: form.op),
    "root": ("root ranks", lambda form: form.root),
    "prescale": ("prescale factors", lambda form: form.prescale),
    "postscale": ("postscale factors", lambda form: form.postscale),
    "device": ("devices", lambda form: form.device),
}


def _called(form: Form, name: str) -> str:
    """An operation for a message: its name tells the kind, unless the user has given none."""
    return f"{form.kind} without a name ({name})" if name.startswith("noname.") else name


def _shape(shape: Sequence[int]) -> str:
    return "(" + ", ".join("any" if rows < 0 else str(rows) for rows in shape) + ")"


def _difference(forms: dict[int, Form]) -> str:
    for field, (what, show) in _ASPECTS.items():
        groups: dict[str, list[int]] = {}
        for rank in sorted(forms):
            groups.setdefault(str(show(forms[rank])), []).append(rank)
        if len(groups) > 1:
            kind = "" if field == "kind" else f"{next(iter(forms.values())).kind} "
            found = "; ".join(
                f"{value} on rank{'s' * (len(ranks) > 1)} {told(ranks)}" for value, ranks in groups.items()
            )
            return f"mismatched {kind}{what}: {found}"
    raise AssertionError("the forms are equal")
