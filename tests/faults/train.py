"""Trains with Horovod's calls on the drop-in, or with unidist's own on an engine, and does to one rank what FAULT says.

Each rank writes lines to a file of its own: its process, the fault, how it ended.
"""

import faulthandler
import json
import os
import random
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import unidist
from unidist.launch.topology import detect

PLAN = json.loads(os.environ["FAULT"])
RANK = detect(os.environ).rank
DIRECTORY = Path(os.environ["FAULT_DIRECTORY"])
STEPS = 7
#: Of the loss.
SIZE = 500_000
#: The largest delay in seconds of faults that strike amid something.
AMID = {"init": 0.5, "collective": 0.02, "save": 0.05}


def note(event: str, **values: Any) -> None:
    line = json.dumps({"event": event, "time": time.time(), **values}) + "\n"
    with open(DIRECTORY / f"rank-{RANK}.jsonl", "a") as file:
        file.write(line)


class InjectedError(Exception):
    """What the victim raises."""


def fault(*_: object) -> None:
    note("fault")
    kind = PLAN["kind"]
    if kind == "exception":
        raise InjectedError
    if kind == "exit 0":
        sys.exit(0)
    if kind == "os._exit":
        os._exit(3)
    if kind == "no memory":  # for what comes next
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 2**20,) * 2)
    elif kind == "full disk":  # for a checkpoint, which rank 0 writes
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, 2**16))
    elif kind == "closed pipe":
        reader, writer = os.pipe()
        os.close(reader)
        os.dup2(writer, 1)
        os.dup2(writer, 2)
    elif kind in CALLS:
        CALLS[kind]()
    elif kind.startswith("SIG"):
        os.kill(os.getpid(), signal.Signals[kind])
        time.sleep(60)  # until the signal arrives
    else:
        time.sleep(1)  # until the campaign has cut the network


def extra_call(operation: str, size: int) -> None:
    """A call that the other ranks do not make, by the name of one that they make."""
    tensor = torch.ones(size)
    if PLAN["engine"] == "drop-in":
        import horovod.torch as hvd

        hvd.broadcast(tensor, 0, name="loss.0") if operation == "broadcast" else hvd.allreduce(tensor, name="loss.0")
    elif operation == "broadcast":
        unidist.broadcast(tensor, src=0)
    else:
        unidist.all_reduce(tensor)


CALLS = {
    "other shape": lambda: extra_call("all_reduce", 7),
    "other operation": lambda: extra_call("broadcast", SIZE),
    "other order": lambda: extra_call("all_reduce", SIZE),
}


def strike(moment: str, step: int | None = None) -> None:
    """The fault, if this is its rank, its moment and its step."""
    if (PLAN["victim"], PLAN["moment"]) != (RANK, moment) or step not in (None, PLAN["step"]):
        return
    if moment not in AMID or PLAN["kind"] in CALLS:
        fault()
        return
    # Amid the next call: in this thread if it is to raise.
    delay = random.Random(PLAN["seed"]).uniform(0, AMID[moment])
    action = fault
    if PLAN["kind"] in ("exception", "exit 0"):
        signal.signal(signal.SIGUSR1, fault)
        action = lambda: signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)  # type: ignore[arg-type]  # noqa: E731
    threading.Timer(delay, action).start()


class Data(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 8 * STEPS

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(32)


def start() -> tuple[torch.nn.Module, torch.optim.Optimizer, Callable[[torch.Tensor, str], object]]:
    """The model, its optimizer, and a collective call."""
    model = torch.nn.Sequential(torch.nn.Linear(32, 512), torch.nn.Tanh(), torch.nn.Linear(512, 512))
    if PLAN["engine"] == "drop-in":
        import horovod.torch as hvd

        hvd.init()
        optimizer: Any = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        return model, optimizer, lambda tensor, name: hvd.allreduce(tensor, name=name)
    unidist.init(PLAN["engine"])
    model = unidist.wrap_model(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    return model, optimizer, lambda tensor, name: unidist.all_reduce(tensor)


def main() -> None:
    torch.manual_seed(0)
    early = PLAN["kind"] not in CALLS  # there are no calls before init
    if early:
        strike("init")
    model, optimizer, all_reduce = start()
    if not early:
        strike("init")
    # A worker holds copies of this rank's sockets.
    loader = torch.utils.data.DataLoader(Data(), 8, num_workers=PLAN["workers"])
    for step, batch in enumerate(loader):
        optimizer.zero_grad()
        strike("forward", step)
        out = model(batch)
        if step == PLAN["step"]:
            out.register_hook(lambda grad: strike("backward"))
        loss = out.pow(2).mean()
        loss.backward()
        optimizer.step()
        strike("collective", step)
        for part in range(4 if step == PLAN["step"] else 1):
            all_reduce(torch.full((SIZE,), loss.item()), f"loss.{part}")
        strike("save", step)
        unidist.save_checkpoint(DIRECTORY / f"step-{step % 2}.pt", model=model, optimizer=optimizer, step=step)
        print(f"step {step}", flush=True)
    strike("end")


def note_error(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """An uncaught error, as the user sees it, unless the launcher ends this rank before: unidist explains torch's."""
    note("raised", error=kind.__name__, text=str(error))
    sys.__excepthook__(kind, error, trace)


if __name__ == "__main__":
    faulthandler.register(signal.SIGUSR2, open(DIRECTORY / f"stack-{RANK}", "w"), all_threads=False)  # noqa: SIM115
    note("start", pid=os.getpid())
    sys.excepthook = note_error
    try:
        main()
    except SystemExit as error:
        note("raised", error=type(error).__name__, text=str(error))
        raise
    note("done")
