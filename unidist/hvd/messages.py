"""The messages of the control plane, and their encoding.

Most operations of a training loop come again in each step. The coordinator gives such an operation an id, and from then
on a rank submits it as a bit of a mask (Horovod's response cache). Messages are JSON: what is received can be nothing
but a message. Tensors are never sent here, but for a few numbers (``Request.value``).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

#: An operation's name; of one without a name, its number among such operations of the process set.
Name = str | int


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
    #: Of a process set that is added or removed: its ranks.
    ranks: tuple[int, ...] = ()


class Request(NamedTuple):
    """A rank has submitted an operation."""

    set_id: int
    #: Unique among the rank's pending operations of the process set.
    name: Name
    signature: Signature
    #: The numbers of a small tensor, if they are sent with the request.
    value: bytes = b""


class Definition(NamedTuple):
    """An operation that has an id."""

    #: -1: it is executed this once.
    id: int
    set_id: int
    #: None: any operation without a name.
    name: Name | None
    signature: Signature


# ------------------------------------------------------------------------------------ to the coordinator
class Submit(NamedTuple):
    """Operations that a rank has submitted."""

    #: A bit for the id of each.
    cached: int = 0
    #: Those with a number or a value: id, number (0 with a name), value.
    numbered: tuple[tuple[int, int, bytes], ...] = ()
    #: Those without an id.
    requests: tuple[Request, ...] = ()


class Join(NamedTuple):
    """This rank has no more data."""


class Leave(NamedTuple):
    """This rank shuts down."""


class Rounds(NamedTuple):
    """Rounds of gradient reductions that have begun in a process set; also to the ranks that have joined."""

    set_id: int
    #: The position of the first, counted from 1 in this process set.
    first: int
    #: The number of each round's optimizer in the process set.
    reducers: tuple[int, ...]


class Failure(NamedTuple):
    """This rank cannot go on: it has made fewer collective calls than the others will."""

    reason: str


class Heartbeat(NamedTuple):
    """This process runs; also from the coordinator."""

    #: What the rank is doing.
    activity: str = ""


# ------------------------------------------------------------------------------------ between a leader and rank 0
class Forward(NamedTuple):
    """A message from some ranks of a leader's host, or to some ranks."""

    #: A bit for each.
    ranks: int
    #: As encoded.
    message: bytes


# ------------------------------------------------------------------------------------ to the ranks
class Execute(NamedTuple):
    """Operations of one process set that execute now, in groups that are fused: id and number of each.

    An id of ``-1 - i`` is the i-th of ``new``.
    """

    set_id: int
    groups: tuple[tuple[tuple[int, int], ...], ...]
    new: tuple[Definition, ...] = ()


class Complete(NamedTuple):
    """An operation that needs no collective call: a barrier, or a reduction of values, which rank 0 has computed."""

    set_id: int
    #: Id and number, as in ``Execute``.
    operation: tuple[int, int]
    value: bytes
    new: tuple[Definition, ...] = ()


class Failed(NamedTuple):
    """An operation fails: the ranks do not agree, or cannot execute it."""

    set_id: int
    name: Name
    reason: str


class ProcessSetAdded(NamedTuple):
    """The operation ``name`` of the global process set has made a process set."""

    name: Name
    set_id: int
    ranks: tuple[int, ...]


class ProcessSetRemoved(NamedTuple):
    """The operation ``name`` of the global process set has removed a process set."""

    name: Name
    set_id: int


class AnnounceRounds(NamedTuple):
    """A rank has joined: announce your rounds from now on, and the last ones before."""


class AllJoined(NamedTuple):
    """All ranks have joined, this one last."""

    last: int


class Shutdown(NamedTuple):
    """No operation can execute any more; also from a leader that has lost a rank of its host."""

    reason: str
    #: Seconds after which collective calls that wait for a rank are aborted.
    abort_after: float = math.inf


#: By their names, by which they travel.
_CLASSES = {
    each.__name__: each
    for each in (
        Submit, Join, Leave, Failure, Rounds, Heartbeat, Execute, Complete, Failed, ProcessSetAdded, ProcessSetRemoved,
        AnnounceRounds, AllJoined, Shutdown,
    )
}  # fmt: skip


# In a steady state each step has the same ones. By type: those without fields are equal to each other.
@lru_cache(256, typed=True)
def encode(message: Any) -> bytes:
    """Return the bytes of a message: JSON, in which a named tuple is a list of its fields, and bytes are a text. The
    ranks of ``Forward`` come before its message, which is encoded already.
    """
    if isinstance(message, Forward):
        return b"%x " % message.ranks + message.message
    return json.dumps([type(message).__name__, message], default=lambda data: data.decode("latin-1")).encode()


@lru_cache(256)
def decode(data: bytes) -> Any:
    """Return the message of ``encode``.

    Raises:
        ValueError: there is none.
    """
    try:
        if not data.startswith(b"["):
            ranks, _, message = data.partition(b" ")
            return Forward(int(ranks, 16), message)
        name, fields = json.loads(data)
        return _reader(_CLASSES[name])(fields)
    except Exception as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


@cache
def _reader(kind: Any) -> Callable[[Any], Any]:
    """Return what makes a value of a type from its JSON; ``TypeError`` or ``ValueError`` for that of another one."""
    if kind is bytes:
        return lambda text: text.encode("latin-1")
    if kind is float:
        return float
    if hasattr(kind, "_fields"):
        hints = get_type_hints(kind)
        fields = [_reader(hints[name]) for name in kind._fields]
        return lambda values: kind(*(read(value) for read, value in zip(fields, values, strict=True)))
    if get_origin(kind) is tuple:
        kinds = get_args(kind)
        if kinds[-1] is Ellipsis:
            item = _reader(kinds[0])
            return lambda values: tuple([item(value) for value in values])
        items = [_reader(each) for each in kinds]
        return lambda values: tuple([read(value) for read, value in zip(items, values, strict=True)])
    allowed = get_args(kind) or (kind,)

    def check(value: Any) -> Any:
        if not isinstance(value, allowed):
            raise TypeError(f"{value!r} is no {kind}")
        return value

    return check
