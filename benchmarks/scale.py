"""What grows with parameters, bytes, samples or ranks: at several sizes, beside the raw libraries."""

from __future__ import annotations

import math
import pickle
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

import unidist
from benchmarks import peers, scale_data
from benchmarks.collectives import measure as collective
from benchmarks.measure import OURS, Case, alternate
from unidist.collectives.agreement import first_difference
from unidist.context import current

_MIB = 2**20
#: Its law is looked for among the cases of one name.
_SIZE = re.compile(r", ([\d,]+) (parameters|MiB|samples)$")


def cases(world: str, rounds: int, quick: bool) -> Iterator[Case]:
    """Yield one case for each cost and size."""
    few = max(3, rounds // 3)
    counts = [100, 1000] if quick else [100, 1000, 10_000]
    for count in counts:
        model = _Many(count)
        yield Case("scale", world, f"checks at wrapping, bytes, {count:,} parameters", bytes_of_checks(model), unit="B")
    for mib in (16, 64) if quick else (64, 256, 1024):
        yield Case("scale", world, f"assert_in_sync, {mib:,} MiB", _in_sync(mib, few))
    for count in counts[:2]:
        yield Case("scale", world, f"broadcast_optimizer_state, {count:,} parameters", _optimizer_states(count, few))
    for count in counts[1:]:
        yield Case("scale", world, f"backward, {count:,} parameters", _backward(count, rounds))
    for operation, nbytes in (
        ("all_gather", 4),
        ("all_gather", 4096),
        ("all_reduce", 16 * _MIB),
        ("all_reduce_", 16 * _MIB),
    ):
        yield collective("scale", world, operation, nbytes, rounds)
    if unidist.backend_name() == "gloo":  # the others have the same loader and files
        yield from scale_data.cases(world, rounds, quick)


class _Many(nn.Module):
    """A model of small parameters, whose forward and backward pass cost little."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.ones(64)) for _ in range(count)]).to(unidist.device())

    def forward(self, factor: Tensor) -> Tensor:
        return torch.stack(list(self.weights)).sum() * factor


def bytes_of_checks(model: nn.Module) -> dict[str, list[float]]:
    """Bytes that a rank receives when it compares the parameters with the other ranks'. Collective.

    Those of the comparison of the call itself are left out.
    """
    texts = [f"{name} {tuple(p.shape)} {p.dtype} {p.stride()}" for name, p in model.named_parameters()]
    backend: Any = current()
    received = [0]
    gather, reduce = backend.all_gather, backend.all_reduce

    def all_gather(*args: Any) -> Tensor:
        result: Tensor = gather(*args)
        received[0] += result.numel() * result.element_size()
        return result

    def all_reduce(tensor: Tensor, *args: Any) -> None:
        received[0] += tensor.numel() * tensor.element_size()
        reduce(tensor, *args)

    # Whether a call is compared depends on the number of calls before it, and timed cases make now more, now fewer.
    with patch.multiple(backend, all_gather=all_gather, all_reduce=all_reduce, compares=False):
        first_difference(texts)
    return {OURS: [received[0]], "all names": [len(pickle.dumps(texts)) * unidist.world_size()]}


def _in_sync(mib: int, rounds: int) -> dict[str, list[float]]:
    big = nn.ParameterList([nn.Parameter(torch.zeros(mib * _MIB // 4, device=unidist.device()))])
    return alternate({OURS: lambda: unidist.assert_in_sync(big), "copy": lambda: big[0].detach().clone()}, rounds)


def _optimizer_states(count: int, rounds: int) -> dict[str, list[float]]:
    params = list(_Many(count).parameters())
    optimizer = torch.optim.AdamW(params)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()

    contenders: dict[str, Callable[[], object]] = {OURS: lambda: unidist.broadcast_optimizer_state(optimizer)}
    return alternate({**contenders, **dict(peers.optimizer_states(optimizer))}, rounds)


def _backward(count: int, rounds: int) -> dict[str, list[float]]:
    name, prepare = next(iter(peers.trainers().items()))
    factor = torch.ones((), device=unidist.device())

    def backward(model: nn.Module, end: Callable[[], object] = lambda: None) -> Callable[[], None]:
        def run() -> None:
            model(factor).backward()
            end()

        return run

    theirs, optimizer, _ = prepare(model := _Many(count), torch.optim.SGD(model.parameters(), lr=0.0))
    contenders: dict[str, Callable[[], object]] = {
        OURS: backward(unidist.wrap_model(_Many(count))),
        "replicate": backward(unidist.replicate(_Many(count))),
        # Horovod averages when the optimizer steps.
        name: backward(theirs, optimizer.synchronize) if peers.over_horovod() else backward(theirs),  # type: ignore[attr-defined]
    }
    return alternate(contenders, rounds)


def laws(found: Sequence[Case]) -> Iterator[tuple[str, str, float]]:
    """Yield world, cost and exponent of its growth: the slope of a line through the medians, both in logarithms.

    Of a cost that was measured at two sizes or more.
    """
    sized = [
        (case.world, _SIZE.sub("", case.name), match, case) for case in found if (match := _SIZE.search(case.name))
    ]
    for (world, name), group in groupby(sized, key=lambda row: row[:2]):
        points = [
            (math.log(float(match[1].replace(",", ""))), math.log(max(case.median(), 1e-12)))
            for _, _, match, case in group
        ]
        if len(points) > 1:
            xs, ys = ([point[axis] for point in points] for axis in (0, 1))
            mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
            slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x in xs)
            yield world, name, slope
