"""What users would write instead: the raw libraries, and the other layers over them.

All of them use the process group or Horovod that ``unidist.init()`` started, so they run in the same world.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

import unidist

#: Model, optimizer, and what calls backward on the loss.
Backward = Callable[[Tensor], object]
Prepared = tuple[nn.Module, torch.optim.Optimizer, Backward]
Call = Callable[[], object]


def over_horovod() -> bool:
    """Return whether this world runs on Horovod, so that the raw calls are Horovod's."""
    return unidist.backend_name() == "horovod"


def supported_by_peers() -> bool:
    """Return whether the layers over torch.distributed support this world's backend."""
    return unidist.backend_name() in ("gloo", "nccl")


@cache
def gloo_group() -> Any:
    """Return a gloo group, beside the backend of this world."""
    import torch.distributed as dist

    return dist.new_group(backend="gloo")


# ------------------------------------------------------------------------------------- training
def trainers() -> dict[str, Callable[[nn.Module, torch.optim.Optimizer], Prepared]]:
    """Return how each prepares a model and an optimizer."""
    found: dict[str, Callable[[nn.Module, torch.optim.Optimizer], Prepared]] = {}
    found["hvd" if over_horovod() else "DDP"] = _horovod if over_horovod() else _ddp
    if unidist.backend_name() == "mpi":
        found["DDP on gloo"] = _ddp_on_gloo
    if find_spec("ignite") and (over_horovod() or supported_by_peers()):
        found["ignite"] = _ignite
    if find_spec("accelerate") and supported_by_peers():
        found["Accelerate"] = _accelerate
    if find_spec("lightning_fabric") and supported_by_peers():
        found["Fabric"] = _fabric
    return found


def _ddp(model: nn.Module, optimizer: torch.optim.Optimizer) -> Prepared:
    wrapped = nn.parallel.DistributedDataParallel(model)
    return wrapped, optimizer, Tensor.backward


def _ddp_on_gloo(model: nn.Module, optimizer: torch.optim.Optimizer) -> Prepared:
    wrapped = nn.parallel.DistributedDataParallel(model, process_group=gloo_group())
    return wrapped, optimizer, Tensor.backward


def _horovod(model: nn.Module, optimizer: torch.optim.Optimizer) -> Prepared:
    import horovod.torch as hvd

    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    return model, hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters()), Tensor.backward


def _ignite(model: nn.Module, optimizer: torch.optim.Optimizer) -> Prepared:
    import ignite.distributed as idist

    return idist.auto_model(model), idist.auto_optim(optimizer), Tensor.backward


def _accelerate(model: nn.Module, optimizer: torch.optim.Optimizer) -> Prepared:
    accelerator = _accelerator()
    model, optimizer = accelerator.prepare(model, optimizer)
    return model, optimizer, accelerator.backward


def _fabric(model: nn.Module, optimizer: torch.optim.Optimizer) -> Prepared:
    fabric = _launched_fabric()
    model, optimizer = fabric.setup(model, optimizer)
    return model, optimizer, fabric.backward


@cache
def _accelerator() -> Any:
    from accelerate import Accelerator

    return Accelerator(cpu=unidist.device().type == "cpu")


@cache
def _launched_fabric() -> Any:
    from lightning_fabric import Fabric

    kind = "cpu" if unidist.device().type == "cpu" else "cuda"
    fabric = Fabric(accelerator=kind, devices=unidist.local_size(), num_nodes=unidist.num_nodes(), strategy="ddp")
    fabric.launch()
    return fabric


# -------------------------------------------------------------------------------------- states
def optimizer_states(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Call]]:
    """Yield how an optimizer's state, which is the same on every rank, is broadcast."""

    def one_by_one() -> None:
        for state in optimizer.state.values():
            for tensor in state.values():
                unidist.broadcast(tensor)

    yield "one by one", one_by_one
    if over_horovod():
        import horovod.torch as hvd

        yield "hvd", lambda: hvd.broadcast_optimizer_state(optimizer, 0)


# -------------------------------------------------------------------------------------- metrics
def metrics(figures: dict[str, float]) -> Iterator[tuple[str, Call]]:
    """Yield how each averages some figures over the ranks; the first is the bare collective."""
    import torch.distributed as dist

    device = unidist.device()
    numbers = torch.zeros(len(figures), device=device)  # summed in place, zeros stay zeros
    if over_horovod():
        import horovod.torch as hvd

        yield "hvd", lambda: hvd.allreduce_(numbers, name="bench.metric", op=hvd.Average)
    else:
        yield "all_reduce", lambda: dist.all_reduce(numbers)
    if find_spec("torchmetrics") and not over_horovod():
        yield "torchmetrics", _torchmetrics(figures)
    if find_spec("ignite") and (over_horovod() or supported_by_peers()):
        import ignite.distributed as idist

        def ignite() -> list[float]:
            total = idist.all_reduce(torch.tensor(list(figures.values()), device=device))
            return [number / unidist.world_size() for number in total.tolist()]

        yield "ignite", ignite
    if find_spec("accelerate") and supported_by_peers():
        accelerator = _accelerator()
        yield "Accelerate", lambda: _numbers(accelerator.reduce(_tensors(figures), "mean"))
    if find_spec("lightning_fabric") and supported_by_peers():
        fabric = _launched_fabric()
        yield "Fabric", lambda: _numbers(fabric.all_reduce(_tensors(figures), reduce_op="mean"))


def _tensors(figures: dict[str, float]) -> dict[str, Tensor]:
    return {name: torch.tensor(value, device=unidist.device()) for name, value in figures.items()}


def _numbers(tensors: dict[str, Tensor]) -> dict[str, float]:
    return {name: tensor.item() for name, tensor in tensors.items()}


def _torchmetrics(figures: dict[str, float]) -> Call:
    from torchmetrics import MeanMetric, MetricCollection

    device = unidist.device()
    meters = MetricCollection({name: MeanMetric() for name in figures}, compute_groups=False).to(device)

    def call() -> dict[str, float]:
        meters.reset()
        for name, value in figures.items():
            meters[name].update(value)
        return {name: value.item() for name, value in meters.compute().items()}

    return call


# ----------------------------------------------------------------------------------------- data
def loaders(make: Callable[..., DataLoader[Any]]) -> Iterator[tuple[str, DataLoader[Any]]]:
    """Yield each one's loader of this rank's shard of what ``make()`` loads."""
    plain = make(shuffle=True)
    sampler: DistributedSampler[Any] = DistributedSampler(
        plain.dataset, num_replicas=unidist.world_size(), rank=unidist.rank()
    )
    yield "torch", make(sampler=sampler)
    if find_spec("ignite"):
        import ignite.distributed as idist

        yield (
            "ignite",
            idist.auto_dataloader(
                plain.dataset, batch_size=(plain.batch_size or 1) * unidist.world_size(), shuffle=True
            ),
        )
    if find_spec("accelerate") and supported_by_peers():
        yield "Accelerate", _accelerator().prepare(make(shuffle=True))
    if find_spec("lightning_fabric") and supported_by_peers():
        yield "Fabric", _launched_fabric().setup_dataloaders(make(shuffle=True))


# ---------------------------------------------------------------------------------- collectives
def collectives(operation: str, tensor: Tensor) -> Iterator[tuple[str, Call]]:
    """Yield the raw libraries' call of an operation, results in new tensors as ours."""
    size = unidist.world_size()
    if over_horovod():
        import horovod.torch as hvd

        calls: dict[str, Call] = {
            "all_reduce": lambda: hvd.allreduce(tensor, name="bench", op=hvd.Sum),
            "all_gather": lambda: hvd.allgather(tensor, name="bench.gather"),
            "broadcast": lambda: hvd.broadcast(tensor, 0, name="bench.broadcast"),
        }
        yield "hvd", calls[operation]
    else:
        groups = {"torch": None, "gloo": gloo_group()} if unidist.backend_name() == "mpi" else {"torch": None}
        for name, group in groups.items():
            yield name, _torch_call(operation, tensor, group)
    with suppress(ImportError):
        from mpi4py import MPI

        if MPI.COMM_WORLD.Get_size() == size and tensor.device.type == "cpu":
            yield "mpi4py", _mpi_call(MPI, operation, tensor)


def _torch_call(operation: str, tensor: Tensor, group: Any) -> Call:
    import torch.distributed as dist

    def all_gather() -> None:
        dist.all_gather_into_tensor(tensor.new_empty(unidist.world_size() * tensor.numel()), tensor, group)

    calls: dict[str, Call] = {
        "all_reduce": lambda: dist.all_reduce(tensor.clone(), group=group),
        "all_gather": all_gather,
        "broadcast": lambda: dist.broadcast(tensor.clone(), 0, group=group),
    }
    return calls[operation]


def _mpi_call(MPI: Any, operation: str, tensor: Tensor) -> Call:
    comm, size = MPI.COMM_WORLD, unidist.world_size()

    def all_gather() -> None:
        comm.Allgather(tensor.numpy(), tensor.new_empty(size * tensor.numel()).numpy())

    calls: dict[str, Call] = {
        "all_reduce": lambda: comm.Allreduce(MPI.IN_PLACE, tensor.clone().numpy()),
        "all_gather": all_gather,
        "broadcast": lambda: comm.Bcast(tensor.clone().numpy()),
    }
    return calls[operation]
