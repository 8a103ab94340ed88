"""A backend on top of another one, for ``UNIDIST_CHECK=1``: the ranks compare their calls before they make them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from unidist.backends.base import Group, M, ModelOptions, Op, ReplicatedModel, WrappedModel
from unidist.backends.layer import Layer
from unidist.backends.watch.places import place_of
from unidist.errors import MismatchError
from unidist.operations import dtype_name, format_ranks

#: Bytes that each rank sends before a call: the call, and its line.
_BYTES = 256
_SEPARATOR = "\0"


class Checked(Layer):
    """Compares call, dtype, shape, operation and root of all ranks of a group before each collective call.

    Raises ``MismatchError`` on every rank, with each rank's call and line, where they differ. The gradients of a
    backward pass are not compared.
    """

    def new_group(self, ranks: tuple[int, ...]) -> Group:
        self._compare(f"new_group of ranks {format_ranks(ranks)}", None)
        return self._backend.new_group(ranks)

    def barrier(self, group: Group | None = None) -> None:
        self._compare("barrier", group)
        self._backend.barrier(group)

    def all_reduce(self, tensor: Tensor, op: Op, group: Group | None = None) -> None:
        self._compare(f"all_reduce ({op}) of {_described(tensor)}", group)
        self._backend.all_reduce(tensor, op, group)

    def start_all_reduce(
        self, tensor: Tensor, op: Op, group: Group | None = None, *, call: str = "all_reduce"
    ) -> Callable[[], None]:
        self._compare(f"{call} ({op}) of {_described(tensor)}", group)
        return self._backend.start_all_reduce(tensor, op, group, call=call)

    def broadcast(self, tensor: Tensor, src: int, group: Group | None = None) -> None:
        self._compare(f"broadcast from rank {src} of {_described(tensor)}", group)
        self._backend.broadcast(tensor, src, group)

    def all_gather(self, tensor: Tensor, sizes: Sequence[int], group: Group | None = None) -> Tensor:
        # The ranks know each other's sizes already.
        self._compare(f"all_gather of {dtype_name(tensor.dtype)} of {sum(sizes)} elements in all", group)
        return self._backend.all_gather(tensor, sizes, group)

    def all_to_all(
        self, tensor: Tensor, send: Sequence[int], receive: Sequence[int], group: Group | None = None
    ) -> Tensor:
        self._compare(f"all_to_all of {dtype_name(tensor.dtype)}", group)
        return self._backend.all_to_all(tensor, send, receive, group)

    def reduce_scatter(self, tensor: Tensor, op: Op, group: Group | None = None) -> Tensor:
        self._compare(f"reduce_scatter ({op}) of {_described(tensor)}", group)
        return self._backend.reduce_scatter(tensor, op, group)

    def wrap_model(self, model: M, options: ModelOptions, group: Group | None = None) -> WrappedModel[M]:
        self._compare(f"wrap_model of {type(model).__name__}", group)
        return self._backend.wrap_model(model, options, group)

    def replicate(self, model: nn.Module, options: ModelOptions, group: Group | None = None) -> ReplicatedModel:
        self._compare(f"replicate of {type(model).__name__}", group)
        return self._backend.replicate(model, options, group)

    def _compare(self, call: str, group: Group | None) -> None:
        """Raise if the ranks of the group do not make the same call next. Collective."""
        ranks = self.ranks(group)
        row = f"{call}{_SEPARATOR}{place_of(threading.get_ident())}".encode()[:_BYTES].ljust(_BYTES, b"\0")
        with torch.inference_mode(False):  # whatever the caller's mode
            sent = torch.tensor(list(row), dtype=torch.uint8)
            table = self._backend.all_gather(sent, [_BYTES] * len(ranks), group).view(len(ranks), -1)
        rows = [bytes(each).rstrip(b"\0").decode(errors="replace").partition(_SEPARATOR) for each in table.tolist()]
        if len({made for made, _, _ in rows}) == 1:
            return
        makers: dict[str, list[int]] = {}
        for rank, (made, _, place) in zip(ranks, rows):
            makers.setdefault(f"{made} at {place}", []).append(rank)
        listed = "; ".join(f"rank{'s' * (len(who) > 1)} {format_ranks(who)}: {what}" for what, who in makers.items())
        raise MismatchError(
            f"rank {self.topology.rank} of {self.topology.world_size} ({self.name}): the ranks do not make the same "
            f"call: {listed}. Every rank of a group must make the same calls, in the same order."
        )


def _described(tensor: Tensor) -> str:
    return f"{dtype_name(tensor.dtype)} {list(tensor.shape)}"
