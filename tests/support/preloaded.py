"""Processes that have imported PyTorch when they begin.

To import torch, and what its optimizers and examples/digits.py import, takes longer than most programs of the tests. So
a server imports all once. Where a process of Python begins with the server's address in its environment
(``site/sitecustomize.py`` calls ``begin``), its program runs in a copy of the server, made by fork(), with its
directory, environment and files; the process itself passes on signals and ends as the copy does. A copy ends after its
atexit functions: to free all of torch's objects one by one would take longer than most programs, too. Programs whose
start, parent or death is tested run without the server.
"""

from __future__ import annotations

import array
import atexit
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import NoReturn

#: The address of the server.
SERVER = "UNIDIST_TESTS_PRELOADED"
#: Variables that count when a process or torch starts: where they differ from the server's, the process goes on alone.
EARLY = ("PYTHON", "LD_", "OMP_", "MKL_", "TORCH_DISTRIBUTED_DEBUG", "TORCH_LOGS", "COVERAGE_")
RELAYED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


def early(env: Mapping[str, str]) -> list[str]:
    """What must be the same in the server and in a process."""
    chosen = [item for item in sorted(env.items()) if item[0].startswith(EARLY) and item[0] != "PYTHONPATH"]
    return [sys.prefix, *map("=".join, chosen)]


# ------------------------------------------------------------------------------------- what the launcher starts
def relay(server: socket.socket, argv: list[str]) -> NoReturn:
    """Have the server run the program of this process, and end as it does."""
    files = [int(name) for name in os.listdir("/proc/self/fd") if int(name) != server.fileno()]
    files = [file for file in files if _is_open(file)]
    request = {"argv": argv, "env": dict(os.environ), "cwd": os.getcwd(), "files": files}
    data = json.dumps(request).encode()
    server.sendall(len(data).to_bytes(4, "big"))
    server.sendmsg([data[:1]], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))])
    server.sendall(data[1:])
    answers = server.makefile()  # one buffer: both may be there already
    pid = int(answers.readline())
    for each in RELAYED:
        signal.signal(each, lambda number, frame: os.kill(pid, number))
    answer = answers.readline()
    if not answer:  # the server has ended
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    status = int(answer or -signal.SIGKILL)
    if status < 0:
        if -status not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def _is_open(file: int) -> bool:
    try:
        os.fstat(file)
    except OSError:
        return False
    return True


def begin() -> None:
    """Let the server run this process's program, if it can; else return."""
    argv = sys.orig_argv[1:]
    if argv[:1] == ["-u"]:
        argv = argv[1:]
    if not argv or (argv[0] not in ("-m", "-c") and not os.path.isfile(argv[0])):
        return
    if "--multiprocessing-fork" in argv:  # it may call setsid(), which a copy has done
        return
    with suppress(OSError, ValueError), socket.socket(socket.AF_UNIX) as server:
        server.connect(os.environ[SERVER])
        if early(os.environ) == json.loads(server.makefile().readline()):
            relay(server, argv)


# ------------------------------------------------------------------------------------- the server
def serve(listener: socket.socket) -> dict[str, object]:
    """Fork for each request, until standard input ends; returns the request in each copy."""
    import selectors

    ours = json.dumps(early(os.environ)).encode() + b"\n"
    ready = selectors.DefaultSelector()
    ready.register(listener, selectors.EVENT_READ)
    ready.register(0, selectors.EVENT_READ)
    running: dict[socket.socket, int] = {}
    while True:
        for key, _ in ready.select():
            if isinstance(key.fileobj, socket.socket) and key.fileobj.fileno() < 0:
                continue  # it was closed a moment ago: its process and the copy have ended together
            if key.fileobj is listener:
                client = listener.accept()[0]
                with suppress(OSError):
                    client.sendall(ours)
                ready.register(client, selectors.EVENT_READ)
            elif key.fileobj == 0:
                for pid in running.values():
                    _kill(pid)
                os.unlink(listener.getsockname())
                os.rmdir(os.path.dirname(listener.getsockname()))
                os._exit(0)
            elif key.data is not None:  # a copy has ended
                client = key.data
                pid = running.pop(client)
                status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                ready.unregister(key.fileobj)
                os.close(key.fileobj)
                ready.unregister(client)
                with suppress(OSError):
                    client.sendall(b"%d\n" % status)
                client.close()
            elif (client := key.fileobj) in running:  # it was killed
                _kill(running[client])
            elif (request := _receive(client)) is None:
                ready.unregister(client)
                client.close()
            else:
                pid = os.fork()
                if pid == 0:  # what is closed later would close a file of the program
                    for each in [*ready.get_map().values()]:
                        with suppress(AttributeError):
                            each.fileobj.close()
                    ready.close()
                    return request
                for file in request["opened"]:
                    os.close(file)
                running[client] = pid
                ready.register(os.pidfd_open(pid), selectors.EVENT_READ, client)
                with suppress(OSError):  # it was killed meanwhile: select() tells next
                    client.sendall(b"%d\n" % pid)


def _receive(client: socket.socket) -> dict[str, object] | None:
    try:
        length = client.recv(4, socket.MSG_WAITALL)
        if len(length) < 4:
            return None
        data, opened, _, _ = socket.recv_fds(client, 1, 200)
        request = json.loads(data + client.recv(int.from_bytes(length, "big") - 1, socket.MSG_WAITALL))
    except OSError:
        return None
    return {**request, "opened": list(opened)}


def _kill(pid: int) -> None:
    """Kill a copy and what it has started."""
    import psutil

    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for each in [*process.children(recursive=True), process]:
            with suppress(psutil.NoSuchProcess):
                each.kill()


def become(request: dict[str, object]) -> None:
    """Take over the files, the directory and the environment of the process that was started."""
    import fcntl
    import multiprocessing.process

    import numpy

    high = [fcntl.fcntl(file, fcntl.F_DUPFD, 1000) for file in request["opened"]]
    os.closerange(0, 1000)
    for file, number in zip(high, request["files"], strict=True):
        os.dup2(file, number)
    os.closerange(1000, 1000 + 1000)
    os.setsid()
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    multiprocessing.process.ORIGINAL_DIR = request["cwd"]
    numpy.random.seed()


def execute(argv: list[str]) -> None:
    """Run the program as Python's main program."""
    import importlib.machinery
    import runpy
    import types

    module = sys.modules["__main__"] = types.ModuleType("__main__")
    sys.path[:0] = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if argv[0] == "-m":
        sys.argv = ["-m", *argv[2:]]
        sys.path.insert(0, os.getcwd())
        runpy._run_module_as_main(argv[1])
    elif argv[0] == "-c":
        sys.argv = ["-c", *argv[2:]]
        sys.path.insert(0, "")
        exec(compile(argv[1], "<string>", "exec"), module.__dict__)
    else:
        sys.argv = argv
        sys.path.insert(0, os.path.dirname(os.path.realpath(argv[0])))
        with open(argv[0], "rb") as file:
            code = compile(file.read(), argv[0], "exec")
        module.__file__ = argv[0]
        module.__loader__ = importlib.machinery.SourceFileLoader("__main__", argv[0])
        exec(code, module.__dict__)


def run(argv: list[str]) -> None:
    """``execute``, with its end as Python has it."""
    status = 0
    try:
        execute(argv)
    except SystemExit as error:
        if isinstance(error.code, int):
            status = error.code
        elif error.code is not None:
            print(error.code, file=sys.stderr)
            status = 1
    except BaseException as error:
        traceback = error.__traceback__
        while traceback is not None and traceback.tb_frame.f_code.co_filename == __file__:
            traceback = traceback.tb_next
        sys.excepthook(type(error), error.with_traceback(traceback), traceback)
        if isinstance(error, KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        status = 1
    if "mpi4py.MPI" in sys.modules:  # MPI is finalized when Python is
        sys.exit(status)
    threading._shutdown()  # waits for the threads, as Python does
    atexit._run_exitfuncs()
    for file in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # it is closed
            file.flush()
    os._exit(status & 0xFF)


if __name__ == "__main__":
    sys.path.pop(0)
    import gc

    import numpy  # noqa: F401
    import pytest  # noqa: F401
    import torch._dynamo
    import torch.distributed.launcher.api  # noqa: F401

    # Both work without pandas, whose pyarrow begins a thread: a process that forks may have one thread only.
    sys.modules["pandas"] = None  # type: ignore[assignment]
    for module in ("sklearn.datasets", "torchmetrics"):
        with suppress(ImportError):
            __import__(module)
    del sys.modules["pandas"]
    gc.freeze()  # or copies would look at all of it when they end
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(sys.argv[1])
        listening.listen(64)
        print("ready", flush=True)
        found = serve(listening)
        become(found)
        listening.detach()
    run(found["argv"])
