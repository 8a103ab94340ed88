"""The coordinator of Horovod's operations: which may execute, in which order. Pure: no thread, clock or socket.

Each rank submits its operations in any order. When all ranks of an operation's process set have submitted it, and they
agree, it is executed; the order is the same on all ranks, so that no two of them wait for each other. Small allreduces
that are ready together are executed as one (tensor fusion). Operations that come again have an id, and are counted as
bits of a mask for each rank. ``control`` has the sockets, ``session`` the execution.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from unidist.diagnosis.operations import format_ranks
from unidist.hvd.messages import (
    AllJoined,
    AnnounceRounds,
    Complete,
    Definition,
    Execute,
    Failed,
    Name,
    ProcessSetAdded,
    ProcessSetRemoved,
    Rounds,
    Shutdown,
    Signature,
    Submit,
)

#: Ids that are given at most (the mask of ``Submit`` is a number of so many bits, and Python reads 4,300 digits), and
#: operations without one that are remembered.
_MAX_IDS = 2**13
_MAX_SEEN = 2**14
#: Messages that are kept: in a steady state each step has the same ones.
_MAX_STEADY = 256
#: Rounds that are kept of a process set: more than one rank can be ahead of another.
_HISTORY = 16

#: Messages, with the ranks that receive them.
Outgoing = list[tuple[Sequence[int], Any]]


class Stalled(NamedTuple):
    """An operation that waits for ranks."""

    name: str
    seconds: float
    submitted: list[int]
    missing: list[int]


class _Set:
    """A process set."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks
        #: A bit for each id of its operations.
        self.ids = 0
        self.activate(ranks)

    def activate(self, ranks: tuple[int, ...]) -> None:
        """Let only these ranks be those that have not joined."""
        self.active = ranks
        #: A bit for each.
        self.mask = sum(1 << rank for rank in ranks)
        #: One that lacked a cached operation when they were compared last.
        self.watched = ranks[0] if ranks else -1


class _Pending:
    """An operation that some ranks have submitted by its name."""

    __slots__ = ("different", "id", "name", "ranks", "set_id", "signature", "since", "values")

    def __init__(self, set_id: int, name: Name, signature: Signature, id_: int, since: float) -> None:
        self.set_id = set_id
        self.name = name
        self.signature = signature
        self.id = id_
        self.since = since
        #: A bit for each rank that has submitted it.
        self.ranks = 0
        #: The signatures of ranks that do not agree with the first.
        self.different: dict[int, Signature] = {}
        #: By rank.
        self.values: dict[int, bytes] = {}


class _Fusible(NamedTuple):
    """An operation that is ready."""

    #: Id and number, as in ``Execute``.
    operation: tuple[int, int]
    #: Equal for operations that may be fused; None for one that may not.
    kind: object
    nbytes: int


class Coordinator:
    """The state of the negotiation of one world.

    Args:
        size: number of ranks.
        fusion: fusion threshold in bytes: up to so many are reduced together.
        reduce: reduces values: signature, those of the ranks in rank order, size of the process set.
    """

    def __init__(self, size: int, fusion: int, reduce: Callable[[Signature, list[bytes], int], bytes]) -> None:
        self._sets: dict[int, _Set] = {0: _Set(tuple(range(size)))}
        self._next_set = 1
        self._fusion = fusion
        self._reduce = reduce
        # Operations with an id.
        self._definitions: list[Definition] = []
        self._fusibles: list[_Fusible] = []
        self._ids: dict[tuple[int, Name | None], dict[Signature, int]] = {}
        self._seen: dict[tuple[int, Name | None, Signature], None] = {}
        #: What each rank has submitted by ids: a bit for each.
        self._bits = [0] * size
        #: Ids that are matched by name, because a rank has submitted the name in another way.
        self._by_name = 0
        #: Executed since the last ``stalled``, and when that first saw those that wait.
        self._executed = 0
        self._since: dict[int, float] = {}
        #: Of process sets that have been removed, whose ranks are kept.
        self._removed = 0
        self._removed_sets: dict[int, tuple[int, ...]] = {}
        # Operations that are matched by name, and all that are ready, in order.
        self._pending: dict[tuple[int, Name], _Pending] = {}
        self._ready: list[_Pending | tuple[int, int]] = []
        self._steady: dict[tuple[int, int], Execute] = {}
        self._outgoing: Outgoing = []
        #: Ranks that have joined, in order.
        self.joined: list[int] = []
        self._rounds: dict[int, deque[tuple[int, int]]] = {}
        #: Why no operation can execute any more.
        self.shutdown_reason = ""
        self._abort_after = math.inf

    # -------------------------------------------------------------------------------- from the ranks
    def submit(self, ranks: Sequence[int], message: Submit, now: float) -> None:
        """Take the operations that ranks have submitted, each of them the same.

        Raises:
            ValueError: an id has not been given.
        """
        if self.shutdown_reason:
            return
        if message.cached:
            self._submit_cached(ranks, message.cached, now)
        for rank in ranks if message.numbered or message.requests else ():
            for id_, number, value in message.numbered:
                set_id, name, signature = self._definitions[id_][1:]
                self._submit_named(rank, set_id, number if name is None else name, signature, value, id_, now)
            for set_id, name, signature, value in message.requests:
                self._submit_named(rank, set_id, name, signature, value, -1, now)

    def join(self, rank: int, now: float) -> None:
        """Take part in allreduces with zeros for a rank that has no more data, until all have joined."""
        if self.shutdown_reason or rank in self.joined:
            return
        everybody = self._sets[0].ranks
        if not self.joined:
            self._outgoing.append((everybody, AnnounceRounds()))
        self.joined.append(rank)
        # What it has submitted waits for the active ranks, by name: masks are compared between active ranks.
        for id_ in _ids(self._bits[rank]):
            _, set_id, name, signature = self._definitions[id_]
            assert name is not None
            entry = self._pending[set_id, name] = _Pending(set_id, name, signature, id_, now)
            self._match_by_name(entry)
        for set_id, log in self._rounds.items():
            if log and rank in self._sets[set_id].ranks:
                self._outgoing.append(((rank,), Rounds(set_id, log[0][0], tuple(reducer for _, reducer in log))))
        for set_id, process_set in self._sets.items():
            if rank in process_set.active:
                process_set.activate(tuple(other for other in process_set.active if other != rank))
                if process_set.active:
                    self._match(set_id, process_set, process_set.ids)
        for entry in list(self._pending.values()):
            self._check(entry)

    def begin_rounds(self, message: Rounds) -> None:
        """Let the ranks that have joined make rounds of gradient reductions that another rank has begun."""
        process_set = self._sets.get(message.set_id)
        if process_set is None or not self.joined:  # it was sent before its rank knew that all have joined
            return
        log = self._rounds.setdefault(message.set_id, deque(maxlen=_HISTORY))
        last = log[-1][0] if log else message.first - 1
        new = [(at, reducer) for at, reducer in enumerate(message.reducers, message.first) if at > last]
        if new:
            log.extend(new)
            ranks = [rank for rank in self.joined if rank in process_set.ranks]
            self._outgoing.append((ranks, Rounds(message.set_id, new[0][0], tuple(reducer for _, reducer in new))))

    def shutdown(self, reason: str, *, abort_after: float = math.inf) -> None:
        """Let all operations, pending and later, fail on all ranks.

        Args:
            reason: for their messages; the first one stays.
            abort_after: seconds after which collective calls that wait for a rank are aborted.
        """
        if self.shutdown_reason and abort_after >= self._abort_after:
            return
        self.shutdown_reason = self.shutdown_reason or reason
        self._abort_after = abort_after
        self._pending.clear()
        self._ready.clear()
        self._bits = [0] * len(self._bits)
        self._outgoing.append((self._sets[0].ranks, Shutdown(self.shutdown_reason, abort_after)))

    # -------------------------------------------------------------------------------- to the ranks
    def outgoing(self) -> Outgoing:
        """Return the messages since the last call."""
        if self._ready:
            self._execute()
        outgoing, self._outgoing = self._outgoing, []
        everybody = self._sets[0].ranks
        if self.joined and len(self.joined) == len(everybody):
            outgoing.append((everybody, AllJoined(self.joined[-1])))
            self.joined = []
            self._rounds.clear()
            for process_set in self._sets.values():
                process_set.activate(process_set.ranks)
        return outgoing

    def stalled(self, now: float, seconds: float) -> list[Stalled]:
        """Return the operations that have waited so long for ranks; call it about once a second."""
        found = []
        for entry in self._pending.values():
            if now - entry.since >= seconds:
                name = display_name(entry.signature, entry.name)
                found.append(self._stalled(entry.set_id, name, now - entry.since, entry.ranks))
        waiting = 0
        for bits in self._bits:
            waiting |= bits
        kept, self._executed = waiting & ~self._executed, 0
        self._since = {id_: self._since.get(id_, now) if kept >> id_ & 1 else now for id_ in _ids(waiting)}
        for id_, since in self._since.items():
            if now - since >= seconds:
                set_id, signature = self._definitions[id_].set_id, self._definitions[id_].signature
                name = display_name(signature, self._definitions[id_].name or "")
                ranks = sum(1 << rank for rank in self._sets[set_id].ranks if self._bits[rank] >> id_ & 1)
                found.append(self._stalled(set_id, name, now - since, ranks))
        return found

    def _stalled(self, set_id: int, name: str, seconds: float, ranks: int) -> Stalled:
        process_set = self._sets[set_id]
        return Stalled(name, seconds, among(process_set.ranks, ranks), among(process_set.active, ~ranks))

    # -------------------------------------------------------------------------------- matching
    def _submit_cached(self, ranks: Sequence[int], bits: int, now: float) -> None:
        if bits >> len(self._definitions):
            raise ValueError("an operation of an unknown id")
        for id_ in _ids(bits & (self._by_name | self._removed)):
            _, set_id, name, signature = self._definitions[id_]
            assert name is not None
            for rank in ranks:
                self._submit_named(rank, set_id, name, signature, b"", id_, now)
        bits &= ~(self._by_name | self._removed)
        if bits:
            for rank in ranks:
                self._bits[rank] |= bits
            for set_id, process_set in self._sets.items():
                if bits & process_set.ids:
                    self._match(set_id, process_set, bits & process_set.ids)

    def _match(self, set_id: int, process_set: _Set, candidates: int) -> None:
        """Execute those of some cached operations that all active ranks have submitted."""
        bits = self._bits
        # Mostly one rank lacks all of them: then one comparison is enough.
        candidates &= bits[process_set.watched]
        if not candidates:
            return
        for rank in process_set.active:
            candidates &= bits[rank]
            if not candidates:
                process_set.watched = rank
                return
        for rank in process_set.active:
            bits[rank] &= ~candidates
        self._executed |= candidates
        if len(process_set.active) < len(process_set.ranks):
            for id_ in _ids(candidates):
                _, _, name, signature = self._definitions[id_]
                if error := self._joined_error(process_set, signature):
                    candidates &= ~(1 << id_)
                    self._fail(process_set.active, set_id, name or "", signature, error)
        if candidates:
            self._ready.append((set_id, candidates))

    def _submit_named(
        self, rank: int, set_id: int, name: Name, signature: Signature, value: bytes, id_: int, now: float
    ) -> None:
        process_set = self._sets.get(set_id)
        if process_set is None:
            self._fail((rank,), set_id, name, signature, _removed(set_id))
            return
        entry = self._pending.get((set_id, name))
        if entry is None:
            entry = self._pending[set_id, name] = _Pending(set_id, name, signature, id_, now)
            if (set_id, name) in self._ids:
                self._match_by_name(entry)
        self._add(entry, rank, signature, value)
        self._check(entry)

    def _match_by_name(self, entry: _Pending) -> None:
        """Take what ranks have submitted by the ids of an operation, from now on, as submitted by its name."""
        for signature, id_ in self._ids[entry.set_id, entry.name].items():
            bit = 1 << id_
            if self._by_name & bit:
                continue
            self._by_name |= bit
            for rank in self._sets[entry.set_id].ranks:
                if self._bits[rank] & bit:
                    self._bits[rank] &= ~bit
                    self._add(entry, rank, signature, b"")

    def _add(self, entry: _Pending, rank: int, signature: Signature, value: bytes) -> None:
        entry.ranks |= 1 << rank
        if value:
            entry.values[rank] = value
        # NaN factors are not equal to themselves.
        if signature is not entry.signature and signature != entry.signature and str(signature) != str(entry.signature):
            entry.different[rank] = signature

    def _check(self, entry: _Pending) -> None:
        """Execute an operation if all active ranks have submitted it."""
        process_set = self._sets[entry.set_id]
        if process_set.mask & ~entry.ranks:
            return
        del self._pending[entry.set_id, entry.name]
        error = ""
        ranks = among(process_set.ranks, entry.ranks)
        if entry.different:
            error = _describe_mismatch({rank: entry.different.get(rank, entry.signature) for rank in ranks})
        elif len(ranks) < len(process_set.ranks):
            error = self._joined_error(process_set, entry.signature)
        if error:
            self._fail(ranks, entry.set_id, entry.name, entry.signature, error)
        else:
            self._ready.append(entry)

    def _joined_error(self, process_set: _Set, signature: Signature) -> str:
        if signature.kind == "allreduce" and signature.op != "adasum":
            return ""
        joined = [rank for rank in process_set.ranks if rank not in process_set.active]
        hint = " (with sparse gradients: sparse_as_dense=True)" if signature.kind == "allgather" else ""
        return f"{signature.kind} is not supported while ranks {format_ranks(joined)} have joined{hint}"

    def _fail(self, ranks: Sequence[int], set_id: int, name: Name, signature: Signature, why: str) -> None:
        self._outgoing.append((ranks, Failed(set_id, name, f"{display_name(signature, name)}: {why}")))

    # -------------------------------------------------------------------------------- execution
    def _execute(self) -> None:
        ready, self._ready = self._ready, []
        if len(ready) == 1 and not isinstance(ready[0], _Pending):  # a steady state
            message = self._steady.get(ready[0])
            if message is None:
                message = Execute(ready[0][0], self._fused(self._cached(ready[0][1])))
                if len(self._steady) >= _MAX_STEADY:
                    self._steady.clear()
                self._steady[ready[0]] = message
            self._outgoing.append((self._sets[message.set_id].ranks, message))
            return
        # Operations of one process set that are ready one after another may be fused.
        together: list[_Fusible | _Pending] = []
        last = -1

        def send() -> None:
            if together and last in self._sets:
                # Ids are given in the order in which the messages are sent.
                new: list[Definition] = []
                groups = self._fused([self._fusible(e, new) if isinstance(e, _Pending) else e for e in together])
                self._outgoing.append((self._sets[last].ranks, Execute(last, groups, tuple(new))))
            together.clear()

        for item in ready:
            set_id = item.set_id if isinstance(item, _Pending) else item[0]
            if set_id != last:
                send()
                last = set_id
            if set_id not in self._sets:  # removed by an operation before this one
                self._fail_removed(item)
                continue
            if not isinstance(item, _Pending):
                together += self._cached(item[1])
            elif item.signature.kind in ("add_process_set", "remove_process_set"):
                send()
                self._change_process_sets(item)
            elif item.signature.kind == "barrier" or self._has_all_values(item):
                self._complete(item)
            else:
                together.append(item)
        send()

    def _fail_removed(self, item: _Pending | tuple[int, int]) -> None:
        set_id = item.set_id if isinstance(item, _Pending) else item[0]
        operations: list[tuple[Name, Signature]] = []
        if isinstance(item, _Pending):
            operations.append((item.name, item.signature))
        else:
            definitions = [self._definitions[id_] for id_ in _ids(item[1])]
            operations += [(definition.name or "", definition.signature) for definition in definitions]
        for name, signature in operations:
            self._fail(self._removed_sets[set_id], set_id, name, signature, _removed(set_id))

    def _fusible(self, entry: _Pending, new: list[Definition]) -> _Fusible:
        return _Fusible(self._operation(entry, new), _fusion_key(entry.signature), tensor_bytes(entry.signature))

    def _cached(self, bits: int) -> list[_Fusible]:
        return [self._fusibles[id_] for id_ in _ids(bits)]

    def _fused(self, operations: list[_Fusible]) -> tuple[tuple[tuple[int, int], ...], ...]:
        groups: list[list[tuple[int, int]]] = []
        open_groups: dict[object, tuple[list[tuple[int, int]], int]] = {}
        for operation, kind, nbytes in operations:
            group, filled = open_groups.get(kind, ([], 0))
            if kind is None or not group or filled + nbytes > self._fusion:
                group, filled = [], 0
                groups.append(group)
            group.append(operation)
            if kind is not None:
                open_groups[kind] = (group, filled + nbytes)
        return tuple(map(tuple, groups))

    def _operation(self, entry: _Pending, new: list[Definition]) -> tuple[int, int]:
        """Return an operation's id and number; its definition goes to ``new`` if the ranks do not know it."""
        set_id, signature = entry.set_id, entry.signature
        number, name = (entry.name, None) if isinstance(entry.name, int) else (0, entry.name)
        if entry.id >= 0:
            return entry.id, number
        known = self._ids.get((set_id, name), {})
        id_ = known.get(signature, -1)
        if id_ >= 0:
            return id_, number
        if (set_id, name, signature) not in self._seen:
            if len(self._seen) >= _MAX_SEEN:
                del self._seen[next(iter(self._seen))]
            self._seen[set_id, name, signature] = None
        elif len(self._definitions) < _MAX_IDS and (name is None or not known):
            # It comes again, and always with this signature.
            id_ = len(self._definitions)
            self._definitions.append(Definition(id_, set_id, name, signature))
            self._fusibles.append(_Fusible((id_, 0), _fusion_key(signature), tensor_bytes(signature)))
            self._ids.setdefault((set_id, name), {})[signature] = id_
            self._sets[set_id].ids |= 1 << id_
        # Without an id it is executed this once, under its number.
        new.append(Definition(id_, set_id, entry.name if id_ < 0 else name, signature))
        return -len(new), number

    def _has_all_values(self, entry: _Pending) -> bool:
        return bool(entry.values) and entry.values.keys() >= {
            rank for rank in self._sets[entry.set_id].ranks if entry.ranks >> rank & 1
        }

    def _complete(self, entry: _Pending) -> None:
        ranks = self._sets[entry.set_id].ranks
        value = b""
        if entry.values:
            value = self._reduce(entry.signature, [entry.values[rank] for rank in sorted(entry.values)], len(ranks))
        new: list[Definition] = []
        operation = self._operation(entry, new)
        self._outgoing.append((ranks, Complete(entry.set_id, operation, value, tuple(new))))

    def _change_process_sets(self, entry: _Pending) -> None:
        everybody = self._sets[0].ranks
        signature = entry.signature
        if signature.kind == "add_process_set":
            number, self._next_set = self._next_set, self._next_set + 1
            self._sets[number] = _Set(signature.ranks)
            self._outgoing.append((everybody, ProcessSetAdded(entry.name, number, signature.ranks)))
            return
        number = signature.root
        removed = self._sets.get(number)
        if removed is not None:
            why = _removed(number)
            for pending in [pending for pending in self._pending.values() if pending.set_id == number]:
                del self._pending[number, pending.name]
                ranks = among(removed.ranks, pending.ranks)
                self._fail(ranks, number, pending.name, pending.signature, why)
            for rank in removed.ranks:
                for id_ in _ids(self._bits[rank] & removed.ids):
                    definition = self._definitions[id_]
                    self._fail((rank,), number, definition.name or "", definition.signature, why)
                self._bits[rank] &= ~removed.ids
            self._removed |= removed.ids
            self._removed_sets[number] = removed.ranks
            del self._sets[number]
            self._rounds.pop(number, None)
        self._outgoing.append((everybody, ProcessSetRemoved(entry.name, number)))


def _removed(set_id: int) -> str:
    return f"process set {set_id} has been removed"


def among(ranks: Sequence[int], bits: int) -> list[int]:
    """Return those whose bit is set."""
    return [rank for rank in ranks if bits >> rank & 1]


def _ids(bits: int) -> Iterator[int]:
    """Yield the positions of the bits that are set, ascending."""
    while bits:
        low = bits & -bits
        yield low.bit_length() - 1
        bits ^= low


def _fusion_key(signature: Signature) -> object:
    """Equal for operations that may be fused; None for those that may not."""
    if signature.kind not in ("allreduce", "broadcast") or signature.op == "adasum" or len(set(signature.dtypes)) != 1:
        return None
    return (
        signature.kind,
        signature.dtypes[0],
        signature.op,
        signature.root,
        signature.prescale,
        signature.postscale,
        signature.device,
    )


def tensor_bytes(signature: Signature) -> int:
    """Return the bytes of an operation's tensors on one rank."""
    return sum(
        math.prod(shape) * getattr(torch, dtype).itemsize for dtype, shape in zip(signature.dtypes, signature.shapes)
    )


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


def display_name(signature: Signature, name: Name) -> str:
    """Return an operation for a message: its name contains the kind, unless the user has given no name."""
    return f"{signature.kind} without a name (number {name & 0xFFFFFFFF})" if isinstance(name, int) else name


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
