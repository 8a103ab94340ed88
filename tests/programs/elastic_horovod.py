"""Elastic training with Horovod's calls alone, as in its documentation: it runs on Horovod, and on the drop-in.

Each worker writes what it does to a file of its own in the directory of the first argument. Faults are files there:
``kill.RANK.STEP`` and the like; the worker that finds its own removes it. In a world of a size that is among
HELD_SIZES, the workers train for a step and wait for another world.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import horovod.torch as hvd
import torch

DIRECTORY = Path(sys.argv[1])
EPOCHS, BATCH, SAMPLES = 3, 4, 96
PAUSE = float(sys.argv[2]) if len(sys.argv) > 2 else 0.0
HELD_SIZES = os.environ.get("HELD_SIZES", "").split()


def note(event: str, **values: object) -> None:
    with open(DIRECTORY / f"worker-{os.getpid()}.jsonl", "a") as file:
        place = {"rank": hvd.rank(), "generation": int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))}
        file.write(json.dumps({"event": event, "time": time.time(), **place, **values}) + "\n")


def fault(step: int) -> None:
    """Do to this worker what a file says."""
    for path in DIRECTORY.glob(f"*.{hvd.rank()}.{step}"):
        try:
            path.unlink()
        except FileNotFoundError:
            continue
        note("fault", kind=path.name)
        kind = path.name.split(".")[0]
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "raise":
            raise ValueError("out of luck")
        if kind == "hang":
            time.sleep(1000)


class Numbers(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        x = torch.randn(8, generator=torch.Generator().manual_seed(index))
        return x, x.sum().reshape(1), index


hvd.init()
torch.manual_seed(1)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
dataset = Numbers()
sampler = hvd.elastic.ElasticSampler(dataset, shuffle=True)
loader = torch.utils.data.DataLoader(dataset, batch_size=BATCH, sampler=sampler)


def on_reset() -> None:
    note("reset")


@hvd.elastic.run
def train(state: hvd.elastic.TorchState) -> None:
    note("enter", size=hvd.size(), step=state.step)
    while state.epoch < EPOCHS:
        ids: list[int] = []
        for index, (x, y, number) in enumerate(loader, start=state.batch):
            fault(state.step)
            time.sleep(PAUSE)
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            state.batch = index + 1
            state.step += 1
            state.losses.append(state.step)
            state.sampler.record_batch(index, BATCH)
            ids = number.tolist()
            state.save()
            note("committed", epoch=state.epoch, ids=ids, step=state.step, size=hvd.size())
            state.check_host_updates()
            while str(hvd.size()) in HELD_SIZES:
                time.sleep(0.1)
                state.check_host_updates()
        state.batch = 0
        state.epoch += 1
        state.sampler.set_epoch(state.epoch)
    note("end", step=state.step, losses=state.losses)


state = hvd.elastic.TorchState(model, optimizer, epoch=0, batch=0, step=0, losses=[], sampler=sampler)
state.register_reset_callbacks([on_reset])
train(state)
if hvd.rank() == 0:
    torch.save(model.state_dict(), DIRECTORY / "weights.pt")
