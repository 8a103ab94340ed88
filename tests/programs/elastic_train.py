"""Elastic training with unidist's own calls: a wrapped model or a replicated one, and shard_loader.

Arguments: the directory of its files, ``wrap_model`` or ``replicate``, and seconds that each step takes. What a worker
does, the faults, and HELD_SIZES are as in ``elastic_horovod.py``.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch

import unidist

DIRECTORY, CALL, PAUSE = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
EPOCHS, BATCH, SAMPLES = 3, 4, 96
HELD_SIZES = os.environ.get("HELD_SIZES", "").split()


def note(event: str, **values: object) -> None:
    with open(DIRECTORY / f"worker-{os.getpid()}.jsonl", "a") as file:
        place = {"rank": unidist.rank(), "generation": int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))}
        file.write(json.dumps({"event": event, "time": time.time(), **place, **values}) + "\n")


def fault(step: int) -> None:
    for path in DIRECTORY.glob(f"*.{unidist.rank()}.{step}"):
        path.unlink()
        note("fault", kind=path.name)
        kind = path.name.split(".")[0]
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "raise":
            raise ValueError("out of luck")
        if kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if kind == "sleep":
            time.sleep(1000)


class Numbers(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        x = torch.randn(8, generator=torch.Generator().manual_seed(index))
        return x, x.sum().reshape(1), index


@unidist.elastic.run
def train(state: unidist.elastic.TorchState) -> None:
    loader = unidist.shard_loader(torch.utils.data.DataLoader(Numbers(), batch_size=BATCH, shuffle=True), seed=3)
    if state.data:
        loader.load_state_dict(state.data)
    model = getattr(unidist, CALL)(state.model)
    note("enter", size=unidist.world_size(), step=state.step)
    while loader.epoch < EPOCHS:
        for x, y, number in loader:
            fault(state.step)
            time.sleep(PAUSE)
            state.optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            state.optimizer.step()
            state.step += 1
            state.data = loader.state_dict()
            state.save()
            note("committed", epoch=loader.epoch, ids=number.tolist(), step=state.step, size=unidist.world_size())
            state.check_host_updates()
            while str(unidist.world_size()) in HELD_SIZES:
                time.sleep(0.1)
                state.check_host_updates()
    note("end", step=state.step)


unidist.init(timeout=float(os.environ.get("TIMEOUT", "60")))
torch.manual_seed(1)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
train(unidist.elastic.TorchState(model=model, optimizer=optimizer, step=0, data=None))
if unidist.is_main():
    torch.save(model.state_dict(), DIRECTORY / "weights.pt")
