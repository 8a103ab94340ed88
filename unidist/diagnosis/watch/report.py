"""What the ranks do, as text, and why they do not go on. Nothing here asks anybody."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

from unidist.diagnosis.operations import JOIN, OperationRecord, format_ranks
from unidist.diagnosis.watch.rank_state import RankState

_T = TypeVar("_T")
#: Operations whose tensor has the same dtype and shape on all ranks.
_SAME_SHAPE = ("all_reduce", "broadcast", "reduce", "barrier")
#: The tensor that compares calls: while it is pending the record is that of the call which is compared.
_COMPARISON = ("int64", (2,))
#: Processes and hosts that are listed.
_LISTED = 8
#: A rank may be a moment behind another one.
_MOMENT_S = 1.0


def report(title: str, states: Sequence[RankState]) -> str:
    """Return what all ranks do, with those that do the same in one line, and why they do not go on.

    Args:
        title: the first line.
        states: of all ranks.
    """
    lines = [title]
    for same in _grouped(states, lambda state: (_doing(state), str(state.last_done))):
        last = same[0].last_done if same[0].pending else None
        waited = max((each.pending[0].seconds for each in same if each.pending), default=None)
        since = "" if waited is None else f", for {waited:.0f} s"
        lines.append(f"  {named(same)}: {_doing(same[0])}{since}" + (f"; done before: {last}" if last else ""))
    found = findings(states) or _incomplete(states)
    lines += [f"  => {each[0].upper()}{each[1:]}." for each in found]
    for state in states:
        if state.stacks:
            lines += [f"Stacks of {named([state])}:", state.stacks.rstrip()]
    return "\n".join(lines)


def findings(states: Sequence[RankState]) -> list[str]:
    """Return which ranks keep the others waiting, and how: the likely causes first; empty: none is known."""
    waiting = [each for each in _pending(states) if each.name != JOIN]
    ended = [state for state in states if state.silence and not _has_done_its_part(state, waiting)]
    failed = [state for state in states if not state.silence and state.error]
    causes = [state for state in (*ended, *failed) if not state.follows]
    causes = causes or ended  # all of them by the fault of a rank that is not known
    found = [f"{named(same)} {_agreeing(_silent(same[0]), same)}" for same in _grouped(causes, _silent)]
    different = _mismatch(states)
    if different:
        found.insert(0, different)
    else:
        found += _late([state for state in states if not state.silence])
    return found


def explanation(
    call: str, own: RankState, states: Sequence[RankState], operation: OperationRecord | None = None
) -> tuple[str, str]:
    """Return what has failed and its line, and which rank is missing; the latter is empty where that is not known.

    Args:
        call: what the user has called.
        own: the state of the rank that asks.
        states: of all ranks, in rank order.
        operation: what has failed. Default: the oldest that is pending, else the newest.
    """
    operation = operation or next(iter(own.pending), own.last_done)
    what = call
    if operation is not None:
        what = str(operation) if operation.name == call else f"{call} ({operation})"
    found: list[str] = []
    for seconds in (0.0, math.inf):  # a rank is late only if nothing else is wrong
        if operation is not None and not found:
            waiting = own.waiting_in(operation._replace(seconds=max(operation.seconds, seconds)))
            found = findings([waiting if state.rank == own.rank else state for state in states])
    if not found:
        others = [state for state in states if state.rank != own.rank and not state.silence]
        found = [f"{named([state])} {_failed_or_doing(state)}" for state in others[:4]]
    return f"{what}, at {own.place}" if own.place else what, "; ".join(found)


def named(states: Sequence[RankState]) -> str:
    """Return some ranks, with their hosts and processes."""
    hosts = list(dict.fromkeys(state.host for state in states))
    where = f"host{'s' * (len(hosts) > 1)} {', '.join(hosts[:_LISTED])}" + ", ..." * (len(hosts) > _LISTED)
    if len(states) <= _LISTED and len(hosts) == 1:
        where += f", pid{'s' * (len(states) > 1)} {', '.join(str(state.pid) for state in states)}"
    return f"rank{'s' * (len(states) > 1)} {format_ranks([state.rank for state in states])} ({where})"


def doing(state: RankState) -> str:
    """Return where a rank is, and in or after which operation, for an error message."""
    if state.pending:
        return f"is at {state.place} in {state.pending[0]}"
    return f"is at {state.place}" + (f", after {state.last_done}" if state.last_done else "")


# ---------------------------------------------------------------------------------------------
def _doing(state: RankState) -> str:
    if state.silence or (state.error and not state.pending):
        return _silent(state)
    pending, last = state.pending, state.last_done
    if not pending:
        return f"at {state.place}" + (f"; its last operation was {last}" if last else "; it has made no operation")
    more = f" and {len(pending) - 1} more" if len(pending) > 1 else ""
    return f"at {state.place} in {pending[0]}{more}"


def _failed_or_doing(state: RankState) -> str:
    return f"has failed too, at {state.place}" if state.error else doing(state)


def _silent(state: RankState) -> str:
    """Return how a rank has ended or failed, or why it does not answer."""
    if not state.silence:
        return f"has failed at {state.place}: {state.error}"
    return state.silence + (f": {state.error}" if state.error else "")


def _mismatch(states: Sequence[RankState]) -> str:
    """Return the first operation that the ranks of a group call differently; empty: none is known."""
    calls: dict[tuple[str, tuple[int, ...]], dict[int, list[tuple[RankState, OperationRecord]]]] = {}
    for state in states:
        for each in state.operations:
            if each.number and not each.is_message and (each.dtype, each.shape) != _COMPARISON:
                calls.setdefault((each.group, each.ranks), {}).setdefault(each.number, []).append((state, each))
    for numbers in calls.values():
        for number in sorted(numbers):
            same = _grouped(numbers[number], lambda pair: _signature(pair[1]))
            if len(same) > 1:
                listed = "; ".join(
                    f"{named([state for state, _ in pairs])} {_call(*pairs[0])}" for pairs in same[:_LISTED]
                )
                return f"mismatch in operation {number}: {listed}"
    return ""


def _call(state: RankState, operation: OperationRecord) -> str:
    """Return what a rank has called, with the line if it is there still."""
    what = str(operation._replace(number=0))
    if operation in state.pending[:1] and state.place:
        return f"called {what} at {state.place}"
    return f"called {what}, and ended" if state.silence else f"called {what}, now at {state.place}"


def _signature(operation: OperationRecord) -> Hashable:
    alike = operation.name.removesuffix("_coalesced") in _SAME_SHAPE
    return (operation.name, operation.dtype, operation.shape) if alike else operation.name


def _late(states: Sequence[RankState]) -> list[str]:
    """Return the ranks that have not come to an operation that others wait in."""
    found: dict[str, None] = {}
    waiting = [each for each in _pending(states, _MOMENT_S) if each.name != JOIN]
    waiting.sort(key=lambda each: (each.number, -each.seconds))
    missing = {operation: _missing(operation, states) for operation in waiting}
    late = {state.rank for ranks in missing.values() for state in ranks}
    # One that waits for others itself is late by their fault; if all do, they wait in a circle.
    victims = {state.rank for state in states if any(missing.get(each) for each in state.pending)}
    causes = late - victims or late
    for operation, ranks in missing.items():
        for same in _grouped([state for state in ranks if state.rank in causes], doing):
            is_at, has = _agreeing(doing(same[0]), same), _agreeing("has ", same)
            found[f"{named(same)} {is_at}, and {has}not come to {operation}"] = None
        causes = causes - {state.rank for state in ranks}
    return list(found)


def _incomplete(states: Sequence[RankState]) -> list[str]:
    """Return what is known of the operation that takes longest, if all ranks have come to it."""
    waiting = _pending(states, _MOMENT_S)
    if not waiting:
        return []
    oldest = max(waiting, key=lambda each: each.seconds)
    done = [
        state
        for state in _members(oldest, states)
        if not any(each.key == oldest.key or each.name == JOIN for each in state.pending)
    ]
    if not done:
        return ["all ranks are in it, and it does not complete: look at the network between them"]
    # They have answered a moment later, or what the others wait for is lost.
    completed = f"{named(done)} {_agreeing('has completed it', done)}"
    return [f"all ranks have come to it, and {completed}: if the others do not, look at the network between them"]


def _pending(states: Sequence[RankState], seconds: float = 0.0) -> list[OperationRecord]:
    """Return the collective operations in which ranks have been for at least so long."""
    return [each for state in states for each in state.pending if each.seconds >= seconds and not each.is_message]


def _missing(operation: OperationRecord, states: Sequence[RankState]) -> list[RankState]:
    """Return the ranks that have not come to an operation."""
    return [each for each in _members(operation, states) if not _has_come(each, operation)]


def _members(operation: OperationRecord, states: Sequence[RankState]) -> list[RankState]:
    """Return the ranks that take part in an operation and have not failed."""
    ranks = operation.ranks or [state.rank for state in states]
    return [each for each in states if each.rank in ranks and not each.error]


def _has_done_its_part(state: RankState, waiting: Sequence[OperationRecord]) -> bool:
    """Return whether a rank that has ended without an error had come to all that others wait in."""
    known = bool(waiting and state.operations) and not state.error
    return known and all(_has_come(state, operation) for operation in waiting)


def _has_come(state: RankState, operation: OperationRecord) -> bool:
    """Return whether a rank has begun an operation: by its number, or by its name, which an earlier one may have."""
    group = [each for each in state.operations if (each.group, each.ranks) == (operation.group, operation.ranks)]
    if operation.number:
        return any(each.number >= operation.number for each in group if not each.is_message)
    return any(
        each.name == JOIN or (each.name == operation.name and (not each.done or each.executed > operation.executed))
        for each in group
    )


def _agreeing(said: str, ranks: Sequence[RankState]) -> str:
    """Return what is said of one rank, of one or several."""
    if len(ranks) == 1:
        return said
    verb, _, rest = said.partition(" ")
    return f"{ {'is': 'are', 'has': 'have', 'runs,': 'run,', 'does': 'do'}.get(verb, verb) } {rest}"


def _grouped(items: Iterable[_T], key: Callable[[_T], Hashable]) -> list[list[_T]]:
    """Items with equal keys together, in the order of the first of each."""
    groups: dict[Hashable, list[_T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return list(groups.values())
