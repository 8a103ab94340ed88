"""Commits five times, and fails after the third one, in each attempt or in the first.

python tests/programs/commits.py DIRECTORY once|always|never
"""

import os
import sys
import time
from pathlib import Path

import torch

import unidist

directory, how = Path(sys.argv[1]), sys.argv[2]


@unidist.elastic.run
def train(state: unidist.elastic.TorchState) -> None:
    print(f"{how}: begins at {state.step} in process {os.getpid()}", flush=True)
    while state.step < 5:
        state.step += 1
        state.commit()
        print(f"{how}: committed {state.step}", flush=True)
        if state.step == 3 and (how == "always" or (how == "once" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0")):
            while not (directory / "fail").exists():
                time.sleep(0.05)
            raise ValueError("out of luck")
        if how == "always" and state.step > 3:
            raise ValueError("out of luck again")


unidist.init()
train(unidist.elastic.TorchState(model=torch.nn.Linear(2, 2), step=0))
print(f"{how}: done", flush=True)
