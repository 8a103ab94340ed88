"""Training on CUDA devices; ``tests/support/parity.py`` has the cases that also run on the CPU."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import unidist
import unidist.hvd as hvd


def net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 3)).to(unidist.device())


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(100 * step + unidist.rank())
    return torch.randn(8, 6).to(unidist.device()), torch.randint(3, (8,)).to(unidist.device())


def test_device() -> None:
    assert unidist.device().type == "cuda"
    if unidist.backend_name() == "nccl":
        assert torch.cuda.current_device() == unidist.device().index


def test_scaler_with_autocast() -> None:
    model = unidist.wrap_model(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10)
    for step in range(5):
        inputs, labels = batch(step)
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.float16):
            loss = F.cross_entropy(model(inputs), labels)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    unidist.assert_in_sync(model)
    assert scaler.get_scale() == 2.0**10


def test_compiled_with_inductor() -> None:
    pytest.importorskip("triton", reason="inductor compiles for GPUs with triton, which is not installed")
    plain, compiled = unidist.wrap_model(net()), unidist.wrap_model(torch.compile(net()))
    for model in (plain, compiled):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            inputs, labels = batch(step)
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
    for a, b in zip(plain.parameters(), compiled.parameters()):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_sync_batch_norm_of_uneven_batches() -> None:
    torch.manual_seed(3)
    rows = torch.randn(4 * unidist.world_size() + 2, 5)
    counts = [4] * (unidist.world_size() - 1) + [6]
    mine = torch.split(rows, counts)[unidist.rank()].to(unidist.device())
    norm = unidist.unwrap(unidist.wrap_model(nn.Sequential(nn.BatchNorm1d(5)).to(unidist.device()), sync_bn=True))
    expected = nn.BatchNorm1d(5)(rows)
    torch.testing.assert_close(norm(mine).cpu(), torch.split(expected, counts)[unidist.rank()], rtol=1e-4, atol=1e-5)


def test_join() -> None:
    model = unidist.wrap_model(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with unidist.join(model, optimizer):
        for step in range(2 + unidist.rank()):
            inputs, labels = batch(step)
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
    unidist.assert_in_sync(model)


def test_the_drop_in_trains_as_wrap_model() -> None:
    hvd.init()
    ours, theirs = unidist.wrap_model(net()), net()
    optimizer = torch.optim.Adam(ours.parameters(), lr=0.01)
    other = hvd.DistributedOptimizer(torch.optim.Adam(theirs.parameters(), lr=0.01), theirs.named_parameters())
    hvd.broadcast_parameters(theirs.state_dict(), root_rank=0)
    for step in range(5):
        inputs, labels = batch(step)
        for model, steps in ((ours, optimizer), (theirs, other)):
            steps.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()
            steps.step()
    for a, b in zip(ours.parameters(), theirs.parameters()):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    hvd.shutdown()


def test_checkpoints_and_pinned_batches(tmp_path: Path) -> None:
    directory = Path(unidist.broadcast_object(str(tmp_path)))
    data = TensorDataset(torch.randn(16, 6), torch.randint(3, (16,)))
    loader = unidist.shard_loader(DataLoader(data, 4, pin_memory=unidist.device().type == "cuda"))
    model = unidist.wrap_model(net())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def epoch() -> None:
        for inputs, labels in loader:
            inputs = inputs.to(unidist.device(), non_blocking=True)
            labels = labels.to(unidist.device(), non_blocking=True)
            optimizer.zero_grad()
            F.cross_entropy(F.dropout(model(inputs), 0.5), labels).backward()
            optimizer.step()

    epoch()
    unidist.save_checkpoint(directory / "gpu.pt", model=model, optimizer=optimizer, loader=loader)
    epoch()
    trained = [p.detach().clone() for p in model.parameters()]
    unidist.load_checkpoint(directory / "gpu.pt", model=model, optimizer=optimizer, loader=loader)
    epoch()  # the same dropout masks: the GPU's random state was restored
    assert all(torch.equal(a, b) for a, b in zip(trained, model.parameters()))
