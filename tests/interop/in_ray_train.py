"""unidist in the workers of Ray Train, in local mode."""

import tempfile

import ray
import torch
import torch.distributed as dist
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch.utils.data import DataLoader, TensorDataset

import unidist
from tests.support.ray_start import start_ray


def work() -> None:
    """Runs in each worker."""
    group = dist.group.WORLD
    unidist.init()
    model = unidist.wrap_model(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.randn(16, 4)
    for x, y in unidist.shard_loader(DataLoader(TensorDataset(data, data.sum(1, keepdim=True)), batch_size=4)):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    unidist.assert_in_sync(model)
    assert unidist.allreduce_metric(float(unidist.rank())) == 0.5
    unidist.shutdown()
    assert dist.group.WORLD is group


if __name__ == "__main__":
    start_ray(lambda: ray.init(num_cpus=2, include_dashboard=False))
    storage = RunConfig(storage_path=tempfile.mkdtemp())
    TorchTrainer(work, scaling_config=ScalingConfig(num_workers=2), run_config=storage).fit()
    print("FITTED")
