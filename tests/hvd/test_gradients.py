import torch

from tests.hvd.api import hvd


def test_allreduce(rank: int, size: int) -> None:
    x = torch.full((3,), float(rank), requires_grad=True)
    (hvd.allreduce(x, op=hvd.Sum) * torch.tensor([1.0, 2.0, 3.0]) * (rank + 1)).sum().backward()
    assert torch.allclose(x.grad, torch.tensor([1.0, 2.0, 3.0]) * size * (size + 1) / 2)
    x.grad = None
    (hvd.allreduce(x, prescale_factor=2.0) * (rank + 1)).sum().backward()
    assert torch.allclose(x.grad, torch.full((3,), 2.0 * (size + 1) / 2))


def test_grouped_allreduce(rank: int, size: int) -> None:
    xs = [torch.ones(2, requires_grad=True), torch.ones(3, requires_grad=True)]
    a, b = hvd.grouped_allreduce(xs, op=hvd.Sum)
    ((a * (rank + 1)).sum() + (2 * b).sum()).backward()
    assert torch.allclose(xs[0].grad, torch.full((2,), size * (size + 1) / 2)) and torch.allclose(
        xs[1].grad, torch.full((3,), 2.0 * size)
    )


def test_allgather(rank: int, size: int) -> None:
    x = torch.ones(rank + 1, 2, requires_grad=True)
    gathered = hvd.allgather(x)
    weights = torch.arange(1.0, len(gathered) + 1).unsqueeze(1) * (rank + 1)
    (gathered * weights).sum().backward()
    first = rank * (rank + 1) // 2
    expected = torch.arange(1.0, len(gathered) + 1)[first : first + rank + 1].unsqueeze(1) * (size + 1) / 2
    assert torch.allclose(x.grad, expected.expand(-1, 2))


def test_grouped_allgather(rank: int, size: int) -> None:
    xs = [torch.ones(1, requires_grad=True), torch.ones(rank + 1, requires_grad=True)]
    a, b = hvd.grouped_allgather(xs)
    ((a * (rank + 1)).sum() + (1 * b).sum()).backward()
    assert torch.allclose(xs[0].grad, torch.full((1,), (size + 1) / 2)) and torch.allclose(
        xs[1].grad, torch.ones(rank + 1)
    )


def test_broadcast(rank: int, size: int) -> None:
    x = torch.ones(2, requires_grad=True)
    (hvd.broadcast(x, size - 1) * (rank + 1)).sum().backward()
    assert torch.allclose(x.grad, torch.full((2,), (size + 1) / 2 if rank == size - 1 else 0.0))


def test_alltoall(rank: int, size: int) -> None:
    x = torch.ones(2 * size, requires_grad=True)
    (hvd.alltoall(x) * (rank + 1)).sum().backward()
    assert torch.allclose(x.grad, torch.arange(1.0, size + 1).repeat_interleave(2))


def test_reducescatter(rank: int, size: int) -> None:
    for op, factor in ((hvd.Sum, size), (hvd.Average, 1)):
        x = torch.ones(2 * size, requires_grad=True)
        (hvd.reducescatter(x, op=op) * (rank + 1)).sum().backward()
        assert torch.allclose(x.grad, factor * torch.arange(1.0, size + 1).repeat_interleave(2))
    xs = [torch.ones(size, requires_grad=True)]
    (hvd.grouped_reducescatter(xs, op=hvd.Sum)[0] * (rank + 1)).sum().backward()
    assert torch.allclose(xs[0].grad, size * torch.arange(1.0, size + 1))
