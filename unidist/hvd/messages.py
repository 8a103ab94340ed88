"""The messages of the control plane, and their encoding.

Most operations of a training loop come again in each step. The coordinator gives such an operation an id, and from then
on a rank submits it as a bit of a mask (Horovod's response cache). Messages of a steady state are packed; the others,
which are rare, are JSON: what is received can be nothing but a message. Tensors are never sent here, but for a few
numbers (``Request.value``).
"""

from __future__ import annotations

import json
import math
import struct
from array import array
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


_JSON, _SUBMIT, _EXECUTE, _COMPLETE, _HEARTBEAT, _FORWARD = range(6)
#: Those that travel as JSON, by their position here.
_CLASSES = (
    Join, Leave, Failure, Rounds, Execute, Complete, Failed, ProcessSetAdded, ProcessSetRemoved, AnnounceRounds,
    AllJoined, Shutdown,
)  # fmt: skip
#: Characters of ``Heartbeat.activity`` that are sent.
_MAX_ACTIVITY = 200
_SUBMIT_HEAD = struct.Struct("<II")
_NUMBERED = struct.Struct("<IQH")
_EXECUTE_HEAD = struct.Struct("<II?")
_COMPLETE_HEAD = struct.Struct("<IIQ")
_FORWARD_HEAD = struct.Struct("<H")


def encode(message: Any) -> bytes:
    """The bytes of a message."""
    if isinstance(message, Submit):
        return _encode_submit(message)
    if isinstance(message, Execute) and not message.new:
        return _encode_execute(message)
    if isinstance(message, Complete) and not message.new:
        return (
            bytes((_COMPLETE,)) + _COMPLETE_HEAD.pack(message.set_id, message.operation[0], message.operation[1])
        ) + message.value
    if isinstance(message, Heartbeat):
        return bytes((_HEARTBEAT,)) + message.activity[:_MAX_ACTIVITY].encode(errors="replace")
    if isinstance(message, Forward):
        ranks = _mask_bytes(message.ranks)
        return bytes((_FORWARD,)) + _FORWARD_HEAD.pack(len(ranks)) + ranks + message.message
    return bytes((_JSON,)) + _to_json([_CLASSES.index(type(message)), message])


def decode(data: bytes) -> Any:
    """The message of ``encode``.

    Raises:
        ValueError: there is none.
    """
    try:
        kind, body = data[0], data[1:]
        if kind == _SUBMIT:
            return _decode_submit(body)
        if kind == _EXECUTE:
            return _decode_execute(body)
        if kind == _COMPLETE:
            set_id, id_, number = _COMPLETE_HEAD.unpack_from(body)
            return Complete(set_id, (id_, number), body[_COMPLETE_HEAD.size :])
        if kind == _HEARTBEAT:
            return Heartbeat(body.decode())
        if kind == _FORWARD:
            at = _FORWARD_HEAD.size + _FORWARD_HEAD.unpack_from(body)[0]
            return Forward(int.from_bytes(body[_FORWARD_HEAD.size : at], "little"), body[at:])
        if kind != _JSON:
            raise ValueError(f"{kind} is no kind of message")
        index, fields = json.loads(body)
        return _reader(_CLASSES[index])(fields)
    except Exception as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def _to_json(value: object) -> bytes:
    """A named tuple becomes a list of its fields, and bytes a text."""
    return json.dumps(value, default=lambda data: data.decode("latin-1")).encode()


@cache
def _reader(kind: Any) -> Callable[[Any], Any]:
    """What makes a value of a type from its JSON; it raises ``TypeError`` or ``ValueError`` for that of another one."""
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


def _mask_bytes(mask: int) -> bytes:
    return mask.to_bytes((mask.bit_length() + 7) // 8, "little")


def _encode_submit(message: Submit) -> bytes:
    cached = _mask_bytes(message.cached)
    parts = [bytes((_SUBMIT,)), _SUBMIT_HEAD.pack(len(cached), len(message.numbered)), cached]
    for id_, number, value in message.numbered:
        parts += (_NUMBERED.pack(id_, number, len(value)), value)
    if message.requests:
        parts.append(_to_json(message.requests))
    return b"".join(parts)


def _decode_submit(body: bytes) -> Submit:
    size, count = _SUBMIT_HEAD.unpack_from(body)
    at = _SUBMIT_HEAD.size + size
    cached = int.from_bytes(body[_SUBMIT_HEAD.size : at], "little")
    numbered = []
    for _ in range(count):
        id_, number, length = _NUMBERED.unpack_from(body, at)
        at += _NUMBERED.size + length
        numbered.append((id_, number, body[at - length : at]))
    requests = _reader(tuple[Request, ...])(json.loads(body[at:])) if len(body) > at else ()
    return Submit(cached, tuple(numbered), requests)


# In a steady state each step has the same ones.
@lru_cache(256)
def _encode_execute(message: Execute) -> bytes:
    operations = [operation for group in message.groups for operation in group]
    has_numbers = any(number for _, number in operations)
    return b"".join(
        (
            bytes((_EXECUTE,)),
            _EXECUTE_HEAD.pack(message.set_id, len(message.groups), has_numbers),
            array("I", [len(group) for group in message.groups]).tobytes(),
            array("I", [id_ for id_, _ in operations]).tobytes(),
            array("Q", [number for _, number in operations]).tobytes() if has_numbers else b"",
        )
    )


@lru_cache(256)
def _decode_execute(body: bytes) -> Execute:
    set_id, count, has_numbers = _EXECUTE_HEAD.unpack_from(body)
    at = _EXECUTE_HEAD.size
    lengths = array("I", body[at : at + 4 * count])
    at += 4 * count
    total = sum(lengths)
    ids = array("I", body[at : at + 4 * total])
    numbers = array("Q", body[at + 4 * total :]) if has_numbers else array("Q", bytes(8 * total))
    operations = iter(zip(ids, numbers, strict=True))
    return Execute(set_id, tuple(tuple(next(operations) for _ in range(length)) for length in lengths))
