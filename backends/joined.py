"""A backend on top of another one, for ``unidist.join``: ranks may have run out of data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn, get_args

import torch
from torch import Tensor

from unidist.backends.base import Backend, Group, Op, Start, Wait
from unidist.backends.reductions import neutral_element
from unidist.diagnosis.operations import OperationRecord
from unidist.errors import MismatchError, UnidistError

_OPS: tuple[Op, ...] = get_args(Op)
_DTYPES = (torch.float32, torch.float64, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.uint8)
_DONE, _ALL_REDUCE, _BROADCAST, _BARRIER = range(4)
_CALLS = ("the end of the block", "all_reduce", "broadcast", "barrier")


class Joined(Backend):
    """Allows ranks to make different numbers of collective calls.

    Before each call the ranks exchange what it will be, in one small all_gather. A rank that has run out of data takes
    part in the others' calls with the neutral element: zeros in a sum, infinity in a minimum. (The idea of
    ``torch.distributed.algorithms.Join``, for any backend and any call.)
    """

    compares = False  # each call is exchanged

    def __init__(self, backend: Backend, group: Group | None) -> None:
        super().__init__(backend.name, backend.topology, backend.device)
        self.device_types = backend.device_types
        self.reducible = backend.reducible
        self.groups = backend.groups
        self.inline_bytes = backend.inline_bytes
        self.processes, self.secret = backend.processes, backend.secret
        self._backend = backend
        self._group = group
        #: Global ranks that had not run out of data at the last call.
        self.active: tuple[int, ...] = backend.ranks(group)

    def run_out(self) -> None:
        """Take part in the others' calls until all ranks have run out of data. Collective."""
        while True:
            call = self._exchange(_DONE)
            if call is None:
                return
            kind, op, dtype, numel, src, on_cpu = call
            device = torch.device("cpu") if on_cpu else self.device
            if kind == _ALL_REDUCE:
                neutral = torch.full(
                    (numel,), neutral_element(_OPS[op], _DTYPES[dtype]), dtype=_DTYPES[dtype], device=device
                )
                self._backend.start_all_reduce(neutral, _OPS[op], self._group)()
            elif kind == _BROADCAST:
                self._backend.broadcast(torch.empty(numel, dtype=_DTYPES[dtype], device=device), src, self._group)
            else:
                self._backend.barrier(self._group)

    def barrier(self, group: Group | None = None) -> None:
        self._check("barrier", group)
        self._exchange(_BARRIER)
        self._backend.barrier(group)

    def start_all_reduce(self, tensor: Tensor, op: Op, group: Group | None = None, *, call: str = "all_reduce") -> Wait:
        self._check(call, group)
        self._exchange(_ALL_REDUCE, tensor, op=op)
        return self._backend.start_all_reduce(tensor, op, group, call=call)

    def start_broadcast(self, tensor: Tensor, src: int, group: Group | None = None) -> Wait:
        self._check("broadcast", group)
        self._exchange(_BROADCAST, tensor, src=src)
        if src not in self.active:
            raise UnidistError(f"broadcast from rank {src} inside unidist.join: that rank has run out of data.")
        return self._backend.start_broadcast(tensor, src, group)

    def new_group(self, ranks: tuple[int, ...]) -> Group:
        return self._refuse("new_group")

    def all_gather(self, tensor: Tensor, sizes: Sequence[int], group: Group | None = None) -> Tensor:
        return self._refuse("all_gather, or an *_object or checkpoint call,")

    def all_to_all(
        self, tensor: Tensor, send: Sequence[int], receive: Sequence[int], group: Group | None = None
    ) -> Tensor:
        return self._refuse("all_to_all")

    def reduce_scatter(self, tensor: Tensor, op: Op, group: Group | None = None) -> Tensor:
        return self._refuse("reduce_scatter")

    def process_group(self, group: Group | None, device_type: str) -> NoReturn:
        self._refuse("wrap_model")

    @classmethod
    def start(cls, name: str, start: Start) -> NoReturn:
        raise NotImplementedError("it is made on top of a running backend")

    def shutdown(self) -> None:
        self._backend.shutdown()

    def abort(self) -> None:
        self._backend.abort()

    def quiesce(self) -> None:
        self._backend.quiesce()

    def world_size(self) -> int:
        return self._backend.world_size()

    def operations(self) -> list[OperationRecord]:
        return self._backend.operations()

    def exchange(self, value: str, timeout: float | None = None) -> list[str]:
        return self._backend.exchange(value, timeout)

    def drop_group(self, group: Group) -> None:
        self._backend.drop_group(group)

    def _refuse(self, call: str) -> NoReturn:
        raise UnidistError(
            f"{call} does not work inside unidist.join, where a rank may have run out of data: use all_reduce, "
            "allreduce_metric, global_mean, broadcast or barrier there, or move it out of the block."
        )

    def _check(self, call: str, group: Group | None) -> None:
        if self.ranks(group) != self.ranks(self._group):
            raise UnidistError(
                f"{call} over the ranks {list(self.ranks(group))} inside unidist.join of "
                f"{list(self.ranks(self._group))}: calls inside the block must use its group."
            )

    def _exchange(
        self, kind: int, tensor: Tensor | None = None, op: Op = "sum", src: int = -1
    ) -> tuple[int, ...] | None:
        """Exchange the ranks' next calls; returns that of the ranks that have data, None if none has. Collective."""
        mine = (kind, _OPS.index(op), -1, 0, src, 0)
        if tensor is not None:
            mine = (kind, _OPS.index(op), _DTYPES.index(tensor.dtype), tensor.numel(), src, tensor.device.type == "cpu")
        ranks = self.ranks(self._group)
        table = self._backend.all_gather(torch.tensor(mine), [len(mine)] * len(ranks), self._group)
        calls = {rank: tuple(row) for rank, row in zip(ranks, table.view(len(ranks), -1).tolist()) if row[0] != _DONE}
        if not calls:
            return None
        self.active = tuple(calls)
        first = calls[self.active[0]]
        for rank, call in calls.items():
            if call != first:
                raise MismatchError(
                    f"inside unidist.join, rank {self.active[0]} called {_describe(first)}, and rank {rank} "
                    f"{_describe(call)}: ranks that still have data must make the same calls."
                )
        return first


def _describe(call: tuple[int, ...]) -> str:
    kind, op, dtype, numel, src, on_cpu = call
    what = {_ALL_REDUCE: f" ({_OPS[op]})", _BROADCAST: f" from rank {src}"}.get(kind, "")
    return f"{_CALLS[kind]}{what}" + (f" of {numel} {_DTYPES[dtype]}" + " on a GPU" * (not on_cpu) if numel else "")
