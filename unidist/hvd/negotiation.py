"""The coordinator of Horovod's operations: which may execute, in which order. Pure: no thread, clock or socket.

Each rank sends a request for each operation that it has submitted, in any order. When all ranks of an operation's
process set have sent theirs, and they agree, each of them gets a response; the responses come in one order on all
ranks, so that no two ranks wait for each other. Small allreduces that are ready together get one response (tensor
fusion). ``control`` has the sockets, ``session`` the execution.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch

#: What may differ between the ranks of an operation: rows of its tensors, splits, or the few numbers themselves.
Payload = tuple[int, ...] | bytes


class Signature(NamedTuple):
    """What must be the same on all ranks of an operation."""

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


#: A rank has submitted an operation: process set, name (unique among its pending ones), signature, payload.
#: A plain tuple, which pickles fastest.
Request = tuple[int, str, Signature, Payload]


class Response(NamedTuple):
    """Operations of one process set that execute now, fused."""

    set_id: int
    names: tuple[str, ...]
    #: The first operation's; each one's while a rank has joined, which has submitted none of them.
    signatures: tuple[Signature, ...]
    #: The payload of each rank, in rank order; empty unless all ranks sent one.
    payloads: tuple[Payload, ...] = ()
    #: Why the operations fail instead: the ranks did not agree, or one is lost.
    error: str = ""
    #: The id of a new process set; of a join, the last rank.
    number: int = -1


#: Responses, with the ranks that receive them.
Outgoing = list[tuple[tuple[int, ...], Response]]


class _Pending:
    __slots__ = ("first", "requests", "since")

    def __init__(self, first: Request, since: float) -> None:
        self.first = first
        self.since = since
        #: By rank.
        self.requests: dict[int, Request] = {}


class Coordinator:
    """The state of the negotiation of one world.

    Args:
        size: number of ranks.
        fusion: fusion threshold in bytes: up to so many are reduced together.
    """

    def __init__(self, size: int, fusion: int) -> None:
        self.sets: dict[int, tuple[int, ...]] = {0: tuple(range(size))}
        self._next_set = 1
        self._fusion = fusion
        self._pending: dict[tuple[int, str], _Pending] = {}
        self._ready: list[_Pending] = []
        self._failed: Outgoing = []
        #: Ranks that have joined, in order.
        self.joined: list[int] = []
        #: Why no operation can execute any more.
        self.shutdown_reason = ""

    # -------------------------------------------------------------------------------- from the ranks
    def receive(self, rank: int, requests: Iterable[Request], now: float) -> None:
        """A rank has submitted operations."""
        waiting, sets = self._pending, self.sets
        for request in requests:
            set_id, name, _signature, _ = request
            if self.shutdown_reason or set_id not in sets:
                why = self.shutdown_reason or f"process set {set_id} has been removed"
                self._fail(request, (rank,), why)
                continue
            key = (set_id, name)
            entry = waiting.get(key)
            if entry is None:
                entry = waiting[key] = _Pending(request, now)
            entry.requests[rank] = request
            if len(entry.requests) == len(sets[set_id]) or self.joined:
                self._check(key, entry)

    def join(self, rank: int) -> None:
        """A rank has no more data: it takes part in allreduces with zeros until all have joined."""
        self.joined.append(rank)
        for key, entry in list(self._pending.items()):
            self._check(key, entry)

    def rank_lost(self, rank: int, why: str) -> None:
        """A rank is gone: all operations, pending and later, fail."""
        if not self.shutdown_reason:
            self.shutdown_reason = f"rank {rank} {why}"
            self.fail_all(self.shutdown_reason)

    def fail_all(self, why: str) -> None:
        """Fail all pending operations."""
        for entry in self._pending.values():
            self._fail(entry.first, tuple(entry.requests), why)
        self._pending.clear()

    # -------------------------------------------------------------------------------- to the ranks
    def responses(self) -> Outgoing:
        """The responses since the last call."""
        outgoing, self._failed = self._failed, []
        for entries in self._fused():
            outgoing.append(self._respond(entries))
        everybody = self.sets[0]
        if self.joined and len(self.joined) == len(everybody):
            outgoing.append((everybody, Response(0, (), (), number=self.joined[-1])))
            self.joined = []
        return outgoing

    def stalled(self, now: float, seconds: float) -> list[tuple[str, float, list[int], list[int]]]:
        """Operations that have been pending for at least so long: name, seconds, ranks that submitted it, missing
        ranks.
        """
        found = []
        for (set_id, name), entry in self._pending.items():
            if now - entry.since >= seconds:
                missing = [rank for rank in self.sets[set_id] if rank not in entry.requests]
                found.append((_display_name(entry.first[2], name), now - entry.since, sorted(entry.requests), missing))
        return found

    # --------------------------------------------------------------------------------
    def _check(self, key: tuple[int, str], entry: _Pending) -> None:
        ranks = self.sets[key[0]]
        absent = len(ranks) - len(entry.requests)
        if absent and absent > sum(rank in ranks and rank not in entry.requests for rank in self.joined):
            return
        del self._pending[key]
        error = self._mismatch(entry)
        if error:
            self._fail(entry.first, tuple(entry.requests), error)
        else:
            self._ready.append(entry)

    def _fail(self, request: Request, ranks: tuple[int, ...], why: str) -> None:
        set_id, name, signature, _ = request
        self._failed.append(
            (ranks, Response(set_id, (name,), (signature,), error=f"{_display_name(signature, name)}: {why}"))
        )

    def _fused(self) -> list[list[_Pending]]:
        ready, self._ready = self._ready, []
        if len(ready) < 2:
            return [[entry] for entry in ready]
        groups: list[list[_Pending]] = []
        open_groups: dict[object, tuple[list[_Pending], int]] = {}
        known: dict[tuple[int, int], tuple[object, int]] = {}
        for entry in ready:
            set_id, _, signature, payload = entry.first
            if payload:
                groups.append([entry])
                continue
            # Equal signatures of one message are one object.
            kind, nbytes = known.get((set_id, id(signature))) or known.setdefault(
                (set_id, id(signature)), (_fusion_key(set_id, signature), tensor_bytes(signature))
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

    def _respond(self, entries: list[_Pending]) -> tuple[tuple[int, ...], Response]:
        set_id, _, signature, _ = entries[0].first
        ranks = self.sets[set_id]
        number = -1
        if signature.kind == "add_process_set":
            number, self._next_set = self._next_set, self._next_set + 1
            self.sets[number] = signature.ranks
        elif signature.kind == "remove_process_set":
            self.sets.pop(signature.root, None)
        requests = entries[0].requests
        payloads = tuple(requests[rank][3] for rank in ranks if rank in requests)
        if not all(payloads):
            payloads = ()
        names = tuple(entry.first[1] for entry in entries)
        signatures = tuple(entry.first[2] for entry in entries) if self.joined else (signature,)
        return ranks, Response(set_id, names, signatures, payloads, number=number)

    def _mismatch(self, entry: _Pending) -> str:
        set_id, _, first, _ = entry.first
        requests = entry.requests
        for request in requests.values():
            if request[2] != first:
                return _describe_mismatch({rank: request[2] for rank, request in requests.items()})
        if len(requests) < len(self.sets[set_id]) and (first.kind != "allreduce" or first.op == "adasum"):
            absent = [rank for rank in self.sets[set_id] if rank not in requests]
            hint = " (with sparse gradients: sparse_as_dense=True)" if first.kind == "allgather" else ""
            return f"{first.kind} is not supported while ranks {format_ranks(absent)} have joined{hint}"
        return ""


def _fusion_key(set_id: int, signature: Signature) -> object:
    """Equal for operations that may be fused; None for those that may not."""
    if signature.kind not in ("allreduce", "broadcast") or signature.op == "adasum" or len(set(signature.dtypes)) != 1:
        return None
    return (
        set_id,
        signature.kind,
        signature.dtypes[0],
        signature.op,
        signature.root,
        signature.prescale,
        signature.postscale,
        signature.device,
    )


def tensor_bytes(signature: Signature) -> int:
    """Bytes of an operation's tensors on one rank."""
    return sum(
        math.prod(shape) * getattr(torch, dtype).itemsize for dtype, shape in zip(signature.dtypes, signature.shapes)
    )


def format_ranks(ranks: Sequence[int]) -> str:
    """Ranks for a message: at most 8 are listed."""
    shown = ", ".join(map(str, ranks[:8]))
    return f"{shown}, ... ({len(ranks)} in all)" if len(ranks) > 8 else shown


_ASPECTS: dict[str, tuple[str, Callable[[Signature], object]]] = {
    "kind": ("operations", lambda signature: signature.kind),
    "ranks": ("process sets", lambda signature: list(signature.ranks)),
    "dtypes": ("data types", lambda signature: ", ".join(signature.dtypes)),
    "shapes": ("tensor shapes", lambda signature: ", ".join(_shape(shape) for shape in signature.shapes)),
    "op": ("reduction operations", lambda signature: signature.op),
    "root": ("root ranks", lambda signature: signature.root),
    "prescale": ("prescale factors", lambda signature: signature.prescale),
    "postscale": ("postscale factors", lambda signature: signature.postscale),
    "device": ("devices", lambda signature: signature.device),
}


def _display_name(signature: Signature, name: str) -> str:
    """An operation for a message: its name contains the kind, unless the user has given no name."""
    return f"{signature.kind} without a name ({name})" if name.startswith("noname.") else name


def _shape(shape: Sequence[int]) -> str:
    return "(" + ", ".join("any" if rows < 0 else str(rows) for rows in shape) + ")"


def _describe_mismatch(signatures: dict[int, Signature]) -> str:
    for field, (what, show) in _ASPECTS.items():
        groups: dict[str, list[int]] = {}
        for rank in sorted(signatures):
            groups.setdefault(str(show(signatures[rank])), []).append(rank)
        if len(groups) > 1:
            kind = "" if field == "kind" else f"{next(iter(signatures.values())).kind} "
            found = "; ".join(
                f"{value} on rank{'s' * (len(ranks) > 1)} {format_ranks(ranks)}" for value, ranks in groups.items()
            )
            return f"mismatched {kind}{what}: {found}"
    raise AssertionError("the signatures are equal")
