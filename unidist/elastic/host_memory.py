"""Commits for the processes that a launcher starts after a failure.

``unidist.spark.run_elastic`` has them on the driver. torchrun restarts all processes of a host, and the first of them
keeps each commit in memory that has no name in any directory: it belongs to a process of its own, which ends with
torchrun. So the commits of a job end with it, however it ends, and no other user can open them.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from contextlib import suppress
from typing import IO, Any, Protocol

import torch

from unidist.context import current, local_rank, rank
from unidist.launch.topology import detect
from unidist.network.processes import start_time

_log = logging.getLogger("unidist")
_NAME = "unidist-commits"
#: The program of that process. Its arguments: torchrun's process and when it began, and the files that it holds.
_PROGRAM = """
import sys, time
while True:
    try:
        stat = open(f"/proc/{sys.argv[1]}/stat").read().rpartition(")")[2].split()
    except OSError:
        break
    if stat[0] in "ZX" or stat[19] != sys.argv[2]:
        break
    time.sleep(0.2)
"""
#: Whether a commit could not be written, which was said.
_failed = False
#: The process that has the commits of this one.
_commits: _CommitProcess | None = None
#: Where the launcher keeps them, in place of such a process.
_storage: Storage | None = None


class Storage(Protocol):
    """Where the commits are, for all ranks."""

    def write(self, commit: int, state: Any) -> None:
        """Keep a commit."""

    def read(self) -> tuple[int, Any] | None:
        """Return the last one, or None."""

    def clear(self) -> None:
        """Drop the commits: the training has ended well."""


def store_in(storage: Storage) -> None:
    """Have commits of rank 0 kept somewhere else: the launcher starts processes again."""
    global _storage
    _storage = storage


def restarts() -> bool:
    """Return whether the launcher starts processes again after a failure, as ``torchrun --max-restarts`` does."""
    if _storage is not None:
        return True
    limit = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    return limit.isdigit() and int(limit) > 0 and detect(os.environ).launcher.name == "torchrun"


def write(commit: int, state: Any) -> None:
    """Keep a commit for the processes that come after a restart; no-op where none will.

    Where it cannot be kept, that is said once, and a restart begins with the last commit that could.
    """
    global _failed, _commits
    if not restarts() or not _writes() or _failed:
        return
    try:
        if _storage is None and (_commits is None or not _commits.runs()):  # to find it takes a while
            _commits = _CommitProcess.find() or _CommitProcess.start()
        (_storage or _commits).write(commit, state)  # type: ignore[union-attr]
    except (OSError, RuntimeError) as error:  # torch reports failed writes as the latter
        _failed = True
        _log.warning("commits are not kept for a restart: %s", error)


def read() -> tuple[int, Any] | None:
    """Return the last commit of the processes before a restart, or None."""
    found = (_storage or _CommitProcess.find()) if restarts() else None
    return found.read() if found else None


def remove() -> None:
    """Drop the commits: the training has ended well."""
    if restarts() and _writes() and (found := _storage or _CommitProcess.find()):
        found.clear()


def _writes() -> bool:
    return (rank() if _storage is not None else local_rank()) == 0


class _CommitProcess:
    """The process that holds the commits of a torchrun: two files in memory, and a third that says which has the last.

    Args:
        directory: a descriptor of its directory in /proc.
        files: its descriptors of the three.
    """

    def __init__(self, directory: int, files: list[str]) -> None:
        self._directory = directory
        self._files = files

    @classmethod
    def start(cls) -> _CommitProcess:
        files = [os.memfd_create(_NAME) for _ in range(3)]
        try:
            process = subprocess.Popen(
                [*_command(), *map(str, files)], pass_fds=files, start_new_session=True, cwd="/",
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip
            process.returncode = 0  # it outlives this process
            return cls(os.open(f"/proc/{process.pid}", os.O_DIRECTORY), [*map(str, files)])
        finally:
            for file in files:
                os.close(file)

    @classmethod
    def find(cls) -> _CommitProcess | None:
        """Return the one of this process's torchrun."""
        command = _command()
        for name in filter(str.isdigit, os.listdir("/proc")):
            with suppress(OSError):
                found = cls(os.open(f"/proc/{name}", os.O_DIRECTORY), [])
                with open(os.open("cmdline", os.O_RDONLY, dir_fd=found._directory), "rb") as file:
                    *words, _ = os.fsdecode(file.read()).split("\0")
                found._files = words[-3:]
                if words[:-3] == command and found.runs():
                    return found
        return None

    def _open(self, number: int) -> IO[bytes]:
        file = os.fdopen(os.open(f"fd/{self._files[number]}", os.O_RDWR, dir_fd=self._directory), "r+b")
        # The process may be another user's, or a program that runs as this user and was started by another one.
        is_memory = os.readlink(f"/proc/self/fd/{file.fileno()}") == f"/memfd:{_NAME} (deleted)"
        if not is_memory or os.fstat(file.fileno()).st_uid != os.geteuid():
            file.close()
            raise PermissionError("this is not a file of this user's commits")
        return file

    def write(self, commit: int, state: Any) -> None:
        with self._open(2) as last:
            old = int(last.read() or b"1")
            with self._open(1 - old) as file:
                file.truncate()
                torch.save((commit, state), file)
            last.seek(0)
            last.write(b"%d" % (1 - old))
        with self._open(old) as file:
            file.truncate()

    def read(self) -> tuple[int, Any] | None:
        with self._open(2) as last:
            number = last.read()
        if not number:
            return None
        with self._open(int(number)) as file:  # nobody else can write to it
            found: tuple[int, Any] = torch.load(file, map_location=current().device, weights_only=False)
        return found

    def clear(self) -> None:
        for number in (2, 1, 0):
            with self._open(number) as file:
                file.truncate()

    def runs(self) -> bool:
        """Return whether it holds this user's files."""
        try:
            self._open(2).close()
        except OSError:
            return False
        return True

    def __del__(self) -> None:
        os.close(self._directory)


def _command() -> list[str]:
    """Return the command of the process, without the files that it holds."""
    return [sys.executable, "-ISc", _PROGRAM, str(os.getppid()), start_time(os.getppid())]
