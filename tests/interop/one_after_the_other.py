"""Scripts of other libraries in one process, each in a world that it begins, and unidist in that world.

Arguments: the launcher's name, a directory for the weights, names of libraries.
"""

import gc
import os
import runpy
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

import unidist
from tests.support.worlds import free_port
from unidist import context


def unidist_inside(name: str, launcher: str, directory: Path) -> None:
    """unidist adopts the process group of the library, and leaves it alone at its end."""
    group = dist.group.WORLD
    unidist.init()
    assert context.current().topology.launcher == launcher, context.current().topology
    torch.manual_seed(1)
    model = unidist.wrap_model(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.randn(16, 4)
    loader = unidist.shard_loader(DataLoader(TensorDataset(data, data.sum(1, keepdim=True)), batch_size=4))
    for x, y in loader:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    unidist.assert_in_sync(model)
    assert len(loader) == 2 and unidist.allreduce_metric(float(unidist.rank())) == 0.5
    unidist.save_checkpoint(directory / f"{name}_unidist.pt", model=model)
    unidist.shutdown()
    assert dist.group.WORLD is group


def end_world() -> None:
    """torch begins no second world in the store of the first (gloo finds its old addresses): choose another port."""
    port = [free_port()]
    dist.broadcast_object_list(port)
    os.environ["MASTER_PORT"] = str(port[0])
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)  # torchrun's
    # A model that freed the group would hold the interpreter and wait for the group's threads, and they for the
    # interpreter (https://github.com/pytorch/pytorch/issues/56297). So this reference is the last one.
    group = dist.group.WORLD
    dist.barrier()
    dist.destroy_process_group()
    if "accelerate.state" in sys.modules:
        sys.modules["accelerate.state"].AcceleratorState._reset_state(reset_partial_state=True)
    gc.collect()  # the models
    del group  # its threads


def main(launcher: str, directory: Path, names: list[str]) -> None:
    """Run each script as ``__main__``."""
    for name in names:
        path = Path(__file__).with_name(f"with_{name}.py")
        sys.argv[:] = [str(path), str(directory / f"{name}.pt")]
        runpy.run_path(str(path), run_name="__main__")
        unidist_inside(name, launcher, directory)
        end_world()
    unidist.init("gloo")  # where nothing has begun
    assert unidist.all_reduce(torch.ones(1)).item() == 2 and context.current().topology.launcher == launcher
    unidist.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
