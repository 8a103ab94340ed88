"""Trains with unidist's own calls until there is a file ``end`` in the directory that is its argument.

Each worker writes there what it has committed, and at the begin of each generation how much it holds.
"""

import json
import os
import socket
import sys
import time
from pathlib import Path

import psutil
import torch

import unidist

DIRECTORY = Path(sys.argv[1])
BATCH, SAMPLES = 4, 96


def note(event: str, **values: object) -> None:
    with open(DIRECTORY / f"{event}-{os.getpid()}.jsonl", "a") as file:
        place = {"pid": os.getpid(), "host": socket.gethostname(), "rank": unidist.rank(), "size": unidist.world_size()}
        file.write(json.dumps({"time": time.time(), **place, **values}) + "\n")


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
    model = unidist.wrap_model(state.model)
    generation = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    process = psutil.Process()
    held = {"files": process.num_fds(), "threads": process.num_threads(), "memory": process.memory_info().rss}
    note("enter", generation=generation, step=state.step, **held)
    while True:
        for x, y, number in loader:
            if (DIRECTORY / f"raise.{os.getpid()}").exists():
                raise ValueError("out of luck")
            time.sleep(0.05)
            state.optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            state.optimizer.step()
            state.step += 1
            state.data = loader.state_dict()
            state.save()
            note("committed", generation=generation, epoch=loader.epoch, ids=number.tolist(), step=state.step)
            state.check_host_updates()
            if unidist.all_reduce(torch.tensor(float((DIRECTORY / "end").exists()))) > 0:
                return


unidist.init(timeout=30)
torch.manual_seed(1)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
train(unidist.elastic.TorchState(model=model, optimizer=optimizer, step=0, data=None))
