"""Run a script as it stands, of which rank 1 is killed after some steps: ``killed.py STEPS SCRIPT.py ARGS...``."""

import itertools
import os
import runpy
import signal
import sys

from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

import unidist

STEPS = int(sys.argv[1])
taken = itertools.count(1)


def after_step(optimizer: Optimizer, args: object, kwargs: object) -> None:
    if next(taken) == STEPS and unidist.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)


register_optimizer_step_post_hook(after_step)
sys.argv = sys.argv[2:]
sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))
runpy.run_path(sys.argv[0], run_name="__main__")
