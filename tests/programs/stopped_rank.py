"""The last rank stops, as by SIGSTOP, while all of them make one call again and again; the others abort after a second.

``stopped_rank.py all_reduce | start_all_reduce | backward | first_call | default_group``
"""

import os
import signal
import socket
import sys
import threading
import time

import psutil
import torch

import unidist
from unidist import context

what = sys.argv[1]
if what == "default_group":
    unidist.init()
else:
    context.init_beside_default_group("auto")
backend = context.current()
rank, last = unidist.rank(), unidist.world_size() - 1
group = None if what == "default_group" else backend.new_group(tuple(range(last + 1)))
large = torch.ones(16 * 2**20)  # 64 MB
model = torch.nn.Linear(1024, 4096)
pids = unidist.all_gather_object(os.getpid())
# The script's own connection, which stays.
mine, other = socket.socketpair()
listening = socket.create_server(("127.0.0.1", 0))
client = socket.create_connection(listening.getsockname())
server, _ = listening.accept()
if what == "backward":
    model = unidist.wrap_model(model)


def call() -> None:
    if what == "backward":
        model(torch.ones(64, 1024)).sum().backward()
    elif what == "start_all_reduce":
        backend.start_all_reduce(large, "sum", group)()
    else:
        backend.all_reduce(large, "max", group)


def abort() -> None:
    while psutil.Process(pids[last]).status() != psutil.STATUS_STOPPED:
        time.sleep(0.01)
    time.sleep(1)  # until all wait for it
    backend.abort()
    print(f"rank {rank} aborts at {time.time()}", flush=True)


if what != "first_call":
    call()
unidist.barrier()
if rank == last:
    print(f"STOPPED {os.getpid()}", flush=True)
    if what == "first_call":
        os.kill(os.getpid(), signal.SIGSTOP)
    threading.Timer(0.5, os.kill, [os.getpid(), signal.SIGSTOP]).start()
else:
    threading.Thread(target=abort).start()
try:
    while True:
        call()
except Exception as error:
    print(f"rank {rank} raised {type(error).__name__} at {time.time()}: {error}", flush=True)
try:
    backend.all_reduce(torch.ones(1), "sum", group)
except unidist.CollectiveError as error:
    print(f"rank {rank} is refused: {error}", flush=True)
client.sendall(b"alive")
mine.sendall(b"alive")
assert server.recv(5) == other.recv(5) == b"alive"
print(f"rank {rank} leaves at {time.time()}", flush=True)
if rank == 0:  # the end of the interpreter does the same
    context.leave()
