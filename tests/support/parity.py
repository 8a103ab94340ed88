"""Runs inside a world: trains each case 12 steps on this rank's part of a batch of 12; rank 0 saves the final weights.

    python -m tests.support.parity FILE [PARTS]

With PARTS, one process trains on the first of as many parts alone, as a rank would that never averages.
Every number that a case trains on depends on the step alone, so that worlds of 1, 2 and 3 ranks train on the same.
"""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import unidist

STEPS = 12
WHOLE = 12
LR = 0.05
#: Where the cases train.
DEVICE = torch.device(os.environ.get("UNIDIST_TEST_DEVICE", "cpu"))
PARTS = int(sys.argv[2]) if len(sys.argv) == 3 and __name__ == "__main__" else 0
Case = Callable[[], nn.Module]
CASES: dict[str, Case] = {}


def case(name: str) -> Callable[[Case], Case]:
    def add(function: Case) -> Case:
        CASES[name] = function
        return function

    return add


def mine(rows: Tensor) -> Tensor:
    """This rank's rows of a whole batch."""
    return rows.chunk(PARTS or unidist.world_size())[unidist.rank()]


def batch(step: int, width: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(WHOLE, width, generator=generator, device="cpu")
    targets = torch.randint(0, 3, (WHOLE,), generator=generator, device="cpu")
    return inputs.to(DEVICE), targets.to(DEVICE)


def net(*more: nn.Module) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), *more, nn.Linear(8, 3))


def sgd(model: nn.Module, lr: float = LR) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def loss_of(model: nn.Module, step: int) -> Tensor:
    inputs, targets = batch(step)
    return F.cross_entropy(model(mine(inputs)), mine(targets))


def plain(model: nn.Module, *, lr: float = LR, clip: float | None = None, set_to_none: bool = True) -> nn.Module:
    optimizer = sgd(model, lr)
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=set_to_none)
        loss_of(model, step).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return model


@case("plain step")
def _() -> nn.Module:
    return plain(unidist.wrap_model(net()))


@case("clip_grad_norm_")
def _() -> nn.Module:
    return plain(unidist.wrap_model(net()), clip=0.1)


@case("zero_grad(set_to_none=False)")
def _() -> nn.Module:
    return plain(unidist.wrap_model(net()), set_to_none=False)


def windows(micro: int, window: int) -> Iterator[range]:
    for start in range(0, micro, window):
        yield range(start, min(micro, start + window))


def _accumulate(window: int) -> nn.Module:
    model = unidist.wrap_model(net())
    optimizer = sgd(model)
    for steps in windows(STEPS, window):  # the last one is short
        for step in steps:
            with contextlib.nullcontext() if step == steps[-1] else model.no_sync():
                (loss_of(model, step) / len(steps)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


for _window in (3, 7):
    CASES[f"accumulation, windows of {_window}"] = lambda window=_window: _accumulate(window)  # type: ignore[misc]


@case("autocast bfloat16")
def _() -> nn.Module:
    model = unidist.wrap_model(net())
    # bfloat16 rounds a gradient to 3 digits, so that the steps are small.
    optimizer = torch.optim.SGD(model.parameters(), lr=2e-4)
    for step in range(STEPS):
        optimizer.zero_grad()
        with torch.autocast(DEVICE.type, torch.bfloat16):
            loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
    return model


@case("GradScaler, a step skipped")
def _() -> nn.Module:
    model = unidist.wrap_model(net())
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler(DEVICE.type, init_scale=2.0**8, growth_interval=5)
    skipped = 0
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        if step == 7 and unidist.rank() == unidist.world_size() - 1:
            loss = loss * torch.inf  # on one rank only
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        skipped += scaler.get_scale() < before
    assert skipped == 1, skipped
    return model


@case("several forwards, one backward")
def _() -> nn.Module:
    model = unidist.wrap_model(net())
    optimizer = sgd(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        with model.no_sync():
            first = loss_of(model, step)
        (first + loss_of(model, step + 100)).backward()
        optimizer.step()
    return model


@case("one forward, several backwards")
def _() -> nn.Module:
    model = unidist.wrap_model(net())
    optimizer = sgd(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        inputs, targets = batch(step)
        output = model(mine(inputs))
        F.cross_entropy(output, mine(targets)).backward(retain_graph=True)
        output.square().mean().backward()
        optimizer.step()
    return model


@case("GAN: two models, two optimizers")
def _() -> nn.Module:
    torch.manual_seed(2)
    generator = unidist.wrap_model(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)))
    judge = unidist.wrap_model(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)))
    optimizers = sgd(generator), sgd(judge)
    for step in range(STEPS):
        noise, real = mine(batch(step)[0]), mine(batch(step + 100)[0])
        fake = generator(noise)
        optimizers[1].zero_grad()
        verdict = judge(torch.cat([real, fake.detach()]))
        target = torch.cat([torch.ones(len(real), 1), torch.zeros(len(real), 1)])
        F.binary_cross_entropy_with_logits(verdict, target).backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        F.binary_cross_entropy_with_logits(judge(fake), torch.ones(len(real), 1)).backward()
        optimizers[0].step()
    return nn.ModuleList([unidist.unwrap(generator), unidist.unwrap(judge)])


@case("frozen, later unfrozen")
def _() -> nn.Module:
    inner = net()
    inner[0].requires_grad_(False)
    model = unidist.wrap_model(inner)
    optimizer = sgd(model)
    for step in range(STEPS):
        if step == STEPS // 2:
            inner[0].requires_grad_(True)
            model = unidist.wrap_model(unidist.unwrap(model))
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
    return model


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(6, 6)
        self.last = nn.Linear(6, 6)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


@case("shared parameters")
def _() -> nn.Module:
    return plain(unidist.wrap_model(Tied()))


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.body = net()
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.body[0](x)
        return checkpoint(self.body[1:], x, use_reentrant=self.use_reentrant)  # type: ignore[no-any-return]


for _reentrant in (False, True):
    CASES[f"activation checkpointing, use_reentrant={_reentrant}"] = lambda reentrant=_reentrant: plain(  # type: ignore[misc]
        unidist.wrap_model(Checkpointed(reentrant))
    )


class Branches(nn.Module):
    """Each sample goes through one of three branches; a rank may use some of them, and nobody the third."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.branches = nn.ModuleList(nn.Linear(6, 3) for _ in range(3))

    def forward(self, x: Tensor, which: Tensor) -> Tensor:
        used = [self.branches[i](x[which == i]).square().sum() for i in which.unique().tolist()]
        return torch.stack(used).sum() / len(x)


@case("parameters unused on some or all ranks")
def _() -> nn.Module:
    model = unidist.wrap_model(Branches(), find_unused_parameters=True)
    optimizer = sgd(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        which = (torch.arange(WHOLE) >= (4 if step % 2 else 6)).long()  # the first rank never comes to branch 1
        model(mine(batch(step)[0]), mine(which)).backward()
        optimizer.step()
    return model


class Mixed(nn.Module):
    """Parameters in four dtypes. Data and step size make every sum exact, so that rounding cannot differ."""

    def __init__(self) -> None:
        super().__init__()
        dtypes = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
        self.parts = nn.ParameterList(nn.Parameter(torch.zeros(3, dtype=dtype)) for dtype in dtypes)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([(part.double() * x).sum(1).mean() for part in self.parts]).sum()


@case("float16, bfloat16, float32, float64 parameters")
def _() -> nn.Module:
    model = unidist.wrap_model(Mixed())
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-4)
    for step in range(STEPS):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(step)
        x = 12.0 * torch.randint(-1, 2, (WHOLE, 3), generator=generator, device="cpu").double()
        model(mine(x.to(DEVICE))).backward()
        optimizer.step()
    return model


for _what in ("wrapped", "inner"):

    def _compiled(what: str = _what) -> nn.Module:
        torch._dynamo.reset()
        # The graphs are those of the default compiler, without its generated code.
        if what == "inner":
            model = unidist.wrap_model(torch.compile(net(), backend="aot_eager"))
        else:
            model = torch.compile(unidist.wrap_model(net()), backend="aot_eager")  # type: ignore[assignment]
        return plain(model)

    CASES[f"torch.compile of the {_what} model"] = _compiled


for _compression in ("fp16", "bf16"):
    # Half precision rounds a gradient to 3 digits, so that the steps are small.
    CASES[f'compression="{_compression}"'] = lambda compression=_compression: plain(  # type: ignore[misc]
        unidist.wrap_model(net(), compression=compression), lr=2e-4
    )


@case("sync_bn=True")
def _() -> nn.Module:
    return plain(unidist.wrap_model(net(nn.BatchNorm1d(8)), sync_bn=True))


@case("BatchNorm, buffers of rank 0")
def _() -> nn.Module:
    model = plain(unidist.wrap_model(net(nn.BatchNorm1d(8))))
    # DDP follows before a forward pass, Horovod's wrapper behind it: one more pass without momentum aligns them.
    norm = unidist.unwrap(model)[2]  # type: ignore[index]
    for buffer in norm.buffers():
        buffer.copy_(unidist.broadcast(buffer))
    return model


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.table = nn.Embedding(9, 4, sparse=True)
        self.out = nn.Linear(4, 3)

    def forward(self, words: Tensor) -> Tensor:
        return self.out(self.table(words).mean(1))


@case("sparse embedding gradients")
def _() -> nn.Module:
    model = unidist.wrap_model(Words())
    optimizers = (
        torch.optim.SparseAdam(model.module.table.parameters(), lr=LR / 10),  # type: ignore[union-attr, operator]
        sgd(model.module.out),  # type: ignore[arg-type]
    )
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        words = torch.randint(0, 9, (WHOLE, 2), generator=generator, device="cpu").to(DEVICE)
        for optimizer in optimizers:
            optimizer.zero_grad()
        F.cross_entropy(model(mine(words)), mine(batch(step)[1])).backward()
        for optimizer in optimizers:
            optimizer.step()
    return model


def tokens(step: int) -> tuple[Tensor, Tensor, Tensor]:
    """A batch in which every row has another number of tokens that count."""
    inputs, targets = batch(step)
    counted = torch.arange(WHOLE) % (step % 3 + 2) == 0
    return inputs, targets, counted


def summed(model: nn.Module, step: int) -> tuple[Tensor, int]:
    inputs, targets, counted = (mine(part) for part in tokens(step))
    losses = F.cross_entropy(model(inputs), targets, reduction="none")
    return (losses * counted).sum(), int(counted.sum())


@case("global_mean of uneven counts")
def _() -> nn.Module:
    model = unidist.wrap_model(net())
    optimizer = sgd(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        unidist.global_mean(*summed(model, step)).backward()
        optimizer.step()
    return model


@case("global_mean over accumulation windows")
def _() -> nn.Module:
    model = unidist.wrap_model(net())
    optimizer = sgd(model)
    for steps in windows(STEPS, 3):
        optimizer.zero_grad()
        count = sum(int(mine(tokens(step)[2]).sum()) for step in steps)
        for step in steps:
            with contextlib.nullcontext() if step == steps[-1] else model.no_sync():
                unidist.global_mean(summed(model, step)[0], count).backward()
        optimizer.step()
    return model


@case("join, ranks that run out of data")
def _() -> nn.Module:
    """The last rank's rows end after half of the steps; one process trains on the rows that are left."""
    model = unidist.wrap_model(net())
    optimizer = sgd(model)
    half = STEPS // 2
    cut = WHOLE * 2 // 3  # the rows of the second half: at 3 ranks those of the first two, at 2 ranks 8 of 12
    last = unidist.rank() == unidist.world_size() - 1
    with unidist.join(model, optimizer):
        for step in range(STEPS):
            if step >= half and last and unidist.world_size() == 3:
                break
            inputs, targets = batch(step)
            rows = torch.arange(WHOLE) < (WHOLE if step < half else cut)
            x, y, counted = mine(inputs), mine(targets), mine(rows)
            optimizer.zero_grad()
            losses = F.cross_entropy(model(x), y, reduction="none")
            unidist.global_mean((losses * counted).sum(), int(counted.sum())).backward()
            optimizer.step()
    return model


def main() -> None:
    warnings.filterwarnings("ignore", message=".*torch.jit.script_method")
    unidist.init(timeout=60, device=DEVICE if DEVICE.type == "cuda" else None)
    torch.set_default_device(unidist.device())
    torch.use_deterministic_algorithms(True)
    weights = {}
    for name, train in CASES.items():
        model = train()
        unidist.assert_in_sync(model)
        weights[name] = {key: value.detach() for key, value in unidist.unwrap(model).state_dict().items()}
    if unidist.is_main():
        torch.save(weights, sys.argv[1])
    unidist.shutdown()


if __name__ == "__main__":
    main()
