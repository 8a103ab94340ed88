"""Whether the ranks of a group make the same collective call: compared before it is made, or in its own message."""

from __future__ import annotations

import hashlib
import sys
import threading
import time
from functools import lru_cache
from typing import NoReturn

import torch
from torch import Tensor

from unidist.backends.base import Backend, ComparedCall, Group
from unidist.diagnosis.operations import dtype_name, format_ranks
from unidist.diagnosis.watch.locations import here
from unidist.errors import MismatchError

#: Of the calls of a group, those before which they are compared: the first ones, and each PERIOD-th. On gloo that costs
#: half of an all_reduce of 4 B, and a tenth of one of 1 MB. What is counted are all calls of the group, as these counts
#: agree where the ranks' lines and shapes may not; a prime number, so that each call of a loop has its turn.
_FIRST, _PERIOD = 100, 499
#: Bytes of a call and its line in a message.
_TEXT_BYTES = 512
#: Modules between the caller's frame and ``compare``.
_INSIDE = ("unidist", "torch", "contextlib")


def compare(
    backend: Backend, group: Group | None, call: str, tensor: object = None, option: str = "", *,
    always: bool = False, shown: str = "",
) -> None:  # fmt: skip
    """Raise ``MismatchError`` on every rank if the ranks' calls differ, where this one is compared. Collective.

    Args:
        backend: the running one.
        group: the ranks that make the call.
        call: the function's name.
        tensor: the argument; dtype and shape are compared, or of what is no tensor, its type.
        option: what else must be equal: an operation, a root.
        always: compare this call wherever it is in the count.
        shown: the call in an error, where ranks may differ in what is not compared.
    """
    if not backend.compares or len(backend.ranks(group)) == 1:
        return
    made = backend.calls[group] = backend.calls.get(group, -1) + 1
    if made < _FIRST or made % _PERIOD == 0 or always or backend.compares_all:
        text = described(call, tensor, option)
        mine = digest(f"{_called()}: {text}" if backend.compares_all else text)
        # The complement orders the other way.
        ends = torch.tensor([mine, ~mine])
        dtype, shape = _dtype_and_shape(tensor)
        compared = {"name": call.partition(" ")[0], "dtype": dtype, "shape": shape}
        backend.comparing = ComparedCall(compared, threading.get_ident(), time.monotonic())
        try:
            backend.all_reduce(ends, "max", group)
        finally:
            backend.comparing = None
        if ends.tolist() != [mine, ~mine]:
            _raise(backend, group, shown or text)


def compare_gathered(backend: Backend, group: Group | None, digests: list[int], text: str) -> None:
    """Compare the calls of all ranks, whose digests have come. Collective where they differ."""
    if len(set(digests)) > 1:
        _raise(backend, group, text)


def compare_received(backend: Backend, header: Tensor, received: Tensor, src: int, text: str) -> None:
    """Raise if the header of the root's call is not this rank's. Not collective: the root cannot know."""
    if not torch.equal(header, received):
        raise MismatchError(
            f"{backend.label}: {text} on this rank, and rank {src} has sent another dtype or shape: they must be the "
            "same on every rank."
        )


def described(call: str, tensor: object, option: str = "") -> str:
    """Return a call as errors name it: ``all_reduce (sum) of float32 (2, 3)``."""
    dtype, shape = _dtype_and_shape(tensor)
    of = "" if tensor is None else f" of {type(tensor).__name__ if shape is None else f'{dtype} {shape}'}"
    return f"{call}{option and f' ({option})'}{of}"


def _dtype_and_shape(tensor: object) -> tuple[str, tuple[int, ...] | None]:
    """Return those of a tensor that has a shape, which nested ones do not; no shape for others."""
    if isinstance(tensor, Tensor) and not tensor.is_nested:
        return dtype_name(tensor.dtype), tuple(tensor.shape)
    return "", None


@lru_cache(maxsize=1024)
def digest(text: str) -> int:
    """Return 64 bits of a text, as a signed number."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


def _called() -> str:
    """Return the function of unidist that the user's code has called, or a library's."""
    name, frame = "", sys._getframe()
    while frame is not None and (module := str(frame.f_globals.get("__name__")).partition(".")[0]) in _INSIDE:
        if module == "unidist":
            name = frame.f_code.co_name
        frame = frame.f_back  # type: ignore[assignment]
    return name


def _raise(backend: Backend, group: Group | None, text: str) -> NoReturn:
    """Raise with the calls of all ranks, and their lines. Collective."""
    ranks, called = backend.ranks(group), _called()
    # What the user called, and what it does inside only where that makes the difference.
    outer = text if text.startswith(called.rstrip("_")) else called
    row = "\0".join((outer, text, here())).encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0")
    with torch.inference_mode(False):  # whatever the caller's mode
        sent = torch.tensor(list(row), dtype=torch.uint8)
        table = backend.all_gather(sent, [_TEXT_BYTES] * len(ranks), group).view(len(ranks), -1).tolist()
    rows = [bytes(each).rstrip(b"\0").decode(errors="replace").split("\0", 2) for each in table]
    which = 0 if len({each[0] for each in rows}) > 1 else 1
    makers: dict[str, list[int]] = {}
    for rank, (*calls, place) in zip(ranks, rows):
        makers.setdefault(f"{calls[which]} at {place}", []).append(rank)
    listed = "; ".join(f"rank{'s' * (len(who) > 1)} {format_ranks(who)}: {what}" for what, who in makers.items())
    raise MismatchError(
        f"{backend.label}: the ranks do not make the same call: {listed}. Every rank of a group must make the same "
        "calls, in the same order, of the same dtypes and shapes."
    )
