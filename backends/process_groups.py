"""Process groups of torch.distributed beside its default group, which a script may make and destroy as it likes.

A group is made when it is first used, by its members alone, and connects two ranks when they first exchange data, where
this torch's gloo can (2.13's can): a rank then has as many sockets as its calls need, and not one for each other rank.
"""

from __future__ import annotations

import os
import socket
import stat
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, NamedTuple
from zlib import crc32

import torch
import torch.distributed as dist

from unidist.backends.rendezvous import Rendezvous
from unidist.diagnosis.operations import format_ranks
from unidist.diagnosis.watch.locations import here
from unidist.errors import CollectiveError

#: Default timeout of the members' arrival at a group's first use: that of torch's collectives.
_TIMEOUT = timedelta(minutes=30)
#: Interval, in the end, in which a rank that waits for the other members looks for them.
_LONGEST_PAUSE_S = 0.1
#: Interval in which the sockets of aborted groups are shut down, also those that are opened later.
_ABORT_PERIOD_S = 0.2

_TYPES = dist.ProcessGroup.BackendType


class LazyProcessGroup:
    """A process group that is made when it is first used, by its members."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._made: Any = None
        self._lock = threading.Lock()

    def get(self) -> Any:
        """Return torch's process group. Collective over its members at the first call."""
        if self._made is None:
            with self._lock:
                if self._made is None:
                    self._made = self._make()
        return self._made

    def abort(self) -> None:
        """Let the library abort it, which gloo ignores."""
        if self._made is not None:
            abort(self._made)

    def close(self) -> None:
        """Free its resources. Not collective."""
        with self._lock:
            made, self._made = self._made, None
        if made is not None:
            made.shutdown()


class ProcessGroups:
    """Makes the groups of one ``init``.

    Args:
        library: ``gloo``, ``nccl`` (with gloo for CPU tensors), ``mpi`` (torch's) or ``mpi4py``.
        world: the rendezvous; gloo listens on its ``address``.
        timeout: of collectives. Default: torch's.
        device: the GPU of ``nccl``.
    """

    def __init__(
        self,
        library: str,
        world: Rendezvous,
        timeout: timedelta | None = None,
        device: torch.device | None = None,
    ) -> None:
        self._library = library
        self._world = world
        self._rank = world.topology.rank
        self._timeout = timeout
        self._device = device
        self._numbers = Counter[tuple[int, ...]]()
        self._groups: list[LazyProcessGroup] = []
        #: The global ranks of each group that has been made.
        self.ranks_by_name: dict[str, tuple[int, ...]] = {}
        self.sockets = GlooSockets()
        #: Since when this rank waits for the other members of groups that are being made, by their ranks.
        self._waiting: dict[tuple[int, ...], float] = {}
        #: "closed" or "aborted", after which no call is possible.
        self.ended = ""

    def new_group(self, ranks: Sequence[int]) -> LazyProcessGroup:
        """Make a group of some ranks (ascending), of which this process is one. Members make equal groups in the same
        order.
        """
        number = self._numbers[tuple(ranks)]
        self._numbers[tuple(ranks)] += 1
        name = f"unidist:{crc32(repr(tuple(ranks)).encode()):08x}:{len(ranks)}:{number}"
        self.ranks_by_name[name] = tuple(ranks)
        group = LazyProcessGroup(lambda: self._make(name, ranks))
        self._groups.append(group)
        return group

    def waits(self) -> list[tuple[tuple[int, ...], float]]:
        """Return the groups whose other members this rank waits for, and for how many seconds."""
        now = time.monotonic()
        return [(ranks, now - since) for ranks, since in list(self._waiting.items())]

    def drop(self, group: LazyProcessGroup) -> None:
        """Free a group's resources. Not collective."""
        with suppress(ValueError):
            self._groups.remove(group)
        group.close()

    def close(self) -> None:
        """Free all groups. Not collective."""
        self.ended = "closed"
        while self._groups:
            with suppress(Exception):  # after an error it is broken already
                self._groups.pop().close()

    def abort(self) -> None:
        """Make the calls that are blocked in a group of this process fail soon, and later ones at once. Any thread."""
        first, self.ended = self.ended != "aborted", "aborted"
        if first:
            self.sockets.shutdown()
            threading.Thread(target=self._abort, name="unidist-abort", daemon=True).start()

    def _abort(self) -> None:
        for group in list(self._groups):
            group.abort()
        while self.ended == "aborted":  # a thread may be connecting
            time.sleep(_ABORT_PERIOD_S)
            self.sockets.shutdown()

    # ---------------------------------------------------------------------------------------------
    def _make(self, name: str, ranks: Sequence[int]) -> Any:
        library = self._library
        if library == "mpi":  # it needs no store
            return dist.distributed_c10d.ProcessGroupMPI.create(list(ranks))
        store = dist.PrefixStore(name, self._world.store)
        rank = ranks.index(self._rank)
        if library in ("gloo", "nccl"):
            # It connects at its first call, and would wait long for a rank that has come and could not get this far.
            gloo = self._gloo(dist.PrefixStore("cpu", store), rank, len(ranks), name)
        self._waiting[tuple(ranks)] = time.monotonic()
        try:
            self._wait_for_members(store, ranks)
        finally:
            self._waiting.pop(tuple(ranks), None)
        if library not in ("gloo", "nccl"):
            return self._plugin(library, store, name, ranks)
        group: Any = dist.ProcessGroup(store, rank, len(ranks))
        group._set_default_backend(_TYPES.NCCL if library == "nccl" else _TYPES.GLOO)
        if library == "nccl":
            group.bound_device_id = self._device
        for kind in ("cpu", "cuda") if library == "gloo" and torch.cuda.is_available() else ("cpu",):
            group._register_backend(torch.device(kind), _TYPES.GLOO, gloo)
        if library == "nccl":
            nccl = self._nccl(dist.PrefixStore("cuda", store), rank, ranks, name)
            group._register_backend(torch.device("cuda"), _TYPES.NCCL, nccl)
        group._set_group_name(name)
        return group

    def _wait_for_members(self, store: dist.Store, ranks: Sequence[int]) -> None:
        """Wait until all members have come; a library would wait in the store, where nothing interrupts it."""
        store.set(str(self._rank), "")
        timeout = self._timeout or _TIMEOUT
        end = time.monotonic() + timeout.total_seconds()
        keys = {str(rank): rank for rank in ranks}
        pause = 0.001
        while not store.check(list(keys)):
            if self.ended:
                raise CollectiveError(
                    f"rank {self._rank}: the group of ranks {list(ranks)} was {self.ended} before all of them had come "
                    "to its first call."
                )
            if time.monotonic() > end:
                missing = [rank for key, rank in keys.items() if not store.check([key])]
                raise CollectiveError(
                    f"rank {self._rank}: ranks {format_ranks(missing)} did not come to the first call of the group of "
                    f"ranks {list(ranks)} within {timeout.total_seconds():g} s (called at {here()})."
                )
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    def _gloo(self, store: dist.Store, rank: int, size: int, name: str) -> Any:
        kind: Any = dist.distributed_c10d.ProcessGroupGloo
        options = kind._Options()
        with self.sockets.opened_inside():
            # A device of its own for each group: lazy connections of two groups on one device are mixed up.
            options._devices = [_gloo_device(self._world.address)]
        if self._timeout is not None:
            options._timeout = self._timeout
        options.group_name = name
        return kind(store, rank, size, options)

    def _nccl(self, store: dist.Store, rank: int, ranks: Sequence[int], name: str) -> Any:
        kind: Any = dist.distributed_c10d.ProcessGroupNCCL
        options = kind.Options()
        if self._timeout is not None:
            options._timeout = self._timeout
        options.group_name = name
        options.global_ranks_in_group = list(ranks)
        return kind(store, rank, len(ranks), options)

    def _plugin(self, library: str, store: dist.Store, name: str, ranks: Sequence[int]) -> Any:
        options: Any = dist.distributed_c10d._DistributedBackendOptions()
        options.store = store
        options.group_rank = ranks.index(self._rank)
        options.group_size = len(ranks)
        options.timeout = self._timeout or _TIMEOUT
        options.group_id = name
        options.global_ranks_in_group = list(ranks)
        return dist.Backend._plugins[library.upper()].creator_fn(options, None)


def abort(group: Any) -> None:
    """Let the library abort a process group: NCCL ends its kernels, and the MPI backend the job; gloo does nothing."""
    with suppress(Exception):
        group.abort()


def _gloo_device(address: str) -> Any:
    try:
        return dist.distributed_c10d.ProcessGroupGloo.create_device(hostname=address, lazy_init=True)
    except TypeError:  # before torch 2.8
        return dist.distributed_c10d.ProcessGroupGloo.create_device(hostname=address)


# ------------------------------------------------------------------------------------ gloo's sockets
class _Poll(NamedTuple):
    """The epoll instance of a gloo device: its file descriptor, and the inode of the device's listening socket."""

    fd: int
    listener: int


class GlooSockets:
    """The sockets of the gloo devices of this process that were made ``opened_inside``.

    gloo's own ``abort`` frees no call that waits. A call fails at once when its sockets are shut down. Which sockets
    are gloo's, the epoll instance of each device tells: it polls the device's listening socket and all connections.
    """

    def __init__(self) -> None:
        self._polls: set[_Poll] = set()

    @contextmanager
    def opened_inside(self) -> Iterator[None]:
        """Find the sockets of gloo devices that are made inside; no other listening socket is polled from now on."""
        before = _polls()
        try:
            yield
        finally:
            self._polls |= _polls() - before

    def add(self, other: GlooSockets) -> None:
        """Add the sockets of another object."""
        self._polls |= other._polls

    def shutdown(self) -> None:
        """Shut down the connections: calls that wait for another rank fail."""
        for poll in self._polls:
            polled = _polled_sockets(poll.fd)
            if poll.listener in polled.values():  # else the file descriptor belongs to something else now
                for fd, inode in polled.items():
                    if inode != poll.listener:
                        _shutdown(fd, inode)


def _polls() -> set[_Poll]:
    """Return this process's epoll instances that poll a listening socket."""
    found = set()
    with suppress(OSError):  # not Linux
        for entry in os.listdir("/proc/self/fd"):
            with suppress(OSError):  # closed meanwhile
                if "eventpoll" in os.readlink(f"/proc/self/fd/{entry}"):
                    polled = _polled_sockets(int(entry)).items()
                    found |= {_Poll(int(entry), inode) for fd, inode in polled if _is_listening(fd)}
    return found


def _polled_sockets(poll: int) -> dict[int, int]:
    """Return the file descriptors that an epoll instance polls, and their inodes."""
    found = {}
    with suppress(OSError), open(f"/proc/self/fdinfo/{poll}") as file:
        for words in map(str.split, file):
            if words[0] == "tfd:":
                inode = next((word[4:] for word in words if word.startswith("ino:")), None)
                if inode is not None:
                    found[int(words[1])] = int(inode, 16)
    return found


def _is_listening(fd: int) -> bool:
    if not stat.S_ISSOCK(os.fstat(fd).st_mode):
        return False
    with socket.socket(fileno=os.dup(fd)) as link:
        return bool(link.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _shutdown(fd: int, inode: int) -> None:
    with suppress(OSError):  # closed meanwhile, or not connected
        copy = os.dup(fd)
        if os.fstat(copy).st_ino != inode or not stat.S_ISSOCK(os.fstat(copy).st_mode):
            os.close(copy)
            return
        with socket.socket(fileno=copy) as link:
            link.shutdown(socket.SHUT_RDWR)
