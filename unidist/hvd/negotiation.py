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

#: What a rank says of an operation that may differ between ranks: rows of its tensors, splits, or the few numbers themselves.
Own = tuple[int, ...] | bytes


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


#: A rank is ready for an operation: the process set, a name unlike all that are under way in it, the form, what is this rank's own.
#: Plain tuples travel fastest.
Request = tuple[int, str, Form, Own]


class Answer(NamedTuple):
    """Operations of one process set that begin now, as one."""

    set_id: int
    names: tuple[str, ...]
    #: The first operation's; each one's while somebody has joined, who knows of none.
    forms: tuple[Form, ...]
    #: What each rank said, where it may differ; of a sum, only if all of them sent their numbers.
    table: tuple[Own, ...] = ()
    #: The ranks did not agree, or one is missing for good.
    error: str = ""
    #: Of a new process set, its number; of a join, the last rank.
    number: int = -1


#: Answers, with the ranks that are to hear of them.
Deliveries = list[tuple[tuple[int, ...], Answer]]


class _Entry:
    __slots__ = ("first", "since", "there")

    def __init__(self, first: Request, since: float) -> None:
        self.first = first
        self.since = since
        #: What each rank has said.
        self.there: dict[int, Request] = {}


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
        waiting, sets = self._waiting, self.sets
        for request in requests:
            set_id, name, _form, _ = request
            if self.end or set_id not in sets:
                why = self.end or f"process set {set_id} has been removed"
                self._fail(request, (rank,), why)
                continue
            key = (set_id, name)
            entry = waiting.get(key)
            if entry is None:
                entry = waiting[key] = _Entry(request, now)
            entry.there[rank] = request
            if len(entry.there) == len(sets[set_id]) or self.joined:
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
        for entry in self._waiting.values():
            self._fail(entry.first, tuple(entry.there), why)
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
                missing = [rank for rank in self.sets[set_id] if rank not in entry.there]
                found.append((_called(entry.first[2], name), now - entry.since, sorted(entry.there), missing))
        return found

    # --------------------------------------------------------------------------------
    def _check(self, key: tuple[int, str], entry: _Entry) -> None:
        ranks = self.sets[key[0]]
        absent = len(ranks) - len(entry.there)
        if absent and absent > sum(rank in ranks and rank not in entry.there for rank in self.joined):
            return
        del self._waiting[key]
        error = self._disagreement(entry)
        if error:
            self._fail(entry.first, tuple(entry.there), error)
        else:
            self._ready.append(entry)

    def _fail(self, request: Request, ranks: tuple[int, ...], why: str) -> None:
        set_id, name, form, _ = request
        self._failed.append((ranks, Answer(set_id, (name,), (form,), error=f"{_called(form, name)}: {why}")))

    def _fused(self) -> list[list[_Entry]]:
        ready, self._ready = self._ready, []
        if len(ready) < 2:
            return [[entry] for entry in ready]
        groups: list[list[_Entry]] = []
        open_groups: dict[object, tuple[list[_Entry], int]] = {}
        known: dict[tuple[int, int], tuple[object, int]] = {}
        for entry in ready:
            set_id, _, form, own = entry.first
            if own:
                groups.append([entry])
                continue
            # Equal forms of one letter are one object.
            kind, nbytes = known.get((set_id, id(form))) or known.setdefault(
                (set_id, id(form)), (_fusible(set_id, form), size_of(form))
            )
            if kind is None:
                groups.append([entry])
                continue
            group, filled = open_groups.get(kind, ([], 0))
            if not group or filled + nbytes > self._fusion:
                group, filled = [], 0
                groups.append(group)
            group.append(entry)
            open_groups[kind] = (group, filled + nbytes)
        return groups

    def _answer(self, entries: list[_Entry]) -> tuple[tuple[int, ...], Answer]:
        set_id, _, form, _ = entries[0].first
        ranks = self.sets[set_id]
        number = -1
        if form.kind == "add_process_set":
            number, self._next_set = self._next_set, self._next_set + 1
            self.sets[number] = form.ranks
        elif form.kind == "remove_process_set":
            self.sets.pop(form.root, None)
        said = entries[0].there
        table = tuple(said[rank][3] for rank in ranks if rank in said)
        if not all(table):
            table = ()
        names = tuple(entry.first[1] for entry in entries)
        forms = tuple(entry.first[2] for entry in entries) if self.joined else (form,)
        return ranks, Answer(set_id, names, forms, table, number=number)

    def _disagreement(self, entry: _Entry) -> str:
        set_id, _, first, _ = entry.first
        there = entry.there
        for request in there.values():
            if request[2] != first:
                return _difference({rank: request[2] for rank, request in there.items()})
        if len(there) < len(self.sets[set_id]) and (first.kind != "allreduce" or first.op == "adasum"):
            absent = [rank for rank in self.sets[set_id] if rank not in there]
            hint = " (with sparse gradients: sparse_as_dense=True)" if first.kind == "allgather" else ""
            return f"{first.kind} is not supported while ranks {told(absent)} have joined{hint}"
        return ""


def _fusible(set_id: int, form: Form) -> object:
    """Equal for operations that may travel as one; None for those that may not."""
    if form.kind not in ("allreduce", "broadcast") or form.op == "adasum" or len(set(form.dtypes)) != 1:
        return None
    return (set_id, form.kind, form.dtypes[0], form.op, form.root, form.prescale, form.postscale, form.device)


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
