"""The contract of a backend.

The public functions check and convert their arguments and call these methods; a method makes the library's own call and
nothing else. For all of them:

* Tensors are detached, contiguous, on a device type in ``device_types`` and, in reductions, of a dtype in
  ``reducible``. Methods that only copy take any dtype.
* A method marked *Collective* must be called by every rank of its group, in the same order.
* ``group`` is None for the world, or the result of ``new_group``.
* A library's own exceptions are converted: see ``errors_of``.
"""

from __future__ import annotations

import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from types import TracebackType
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import torch

from unidist.diagnosis.operations import Entry, OperationRecord, RecentOperations
from unidist.diagnosis.spans import Collective, spans
from unidist.errors import CollectiveError, UnidistError
from unidist.launch.topology import Launch, Topology
from unidist.network import open_files
from unidist.network.processes import Process

#: Ample time for a library's thread to release the tensors of the last call.
_QUIESCE_S = 0.1

Op = Literal["sum", "mean", "min", "max", "product"]
#: Waits for an operation that has been started, and raises its errors.
Wait = Callable[[], None]
#: For all ranks to come to ``init()``, where it has no timeout.
START_TIMEOUT = timedelta(seconds=300)


@dataclass(frozen=True)
class Start:
    """The arguments of ``init()`` for a backend."""

    launch: Launch
    init_method: str | None = None
    timeout: timedelta | None = None
    device: torch.device | None = None
    #: Whether torch's default process group is used, and made where there is none. Else it is left alone.
    default_group: bool = True
    #: Number of earlier calls of ``init()`` in this process; the same on every rank.
    attempt: int = 0

    @property
    def start_timeout(self) -> timedelta:
        """Return how long ranks wait until all have come."""
        return self.timeout or START_TIMEOUT


@dataclass(frozen=True, eq=False)
class Group:
    """Some ranks of the world; the result of ``unidist.new_group``.

    Two groups of the same ranks are not equal: each has its own order of calls.
    """

    #: Global ranks, ascending.
    ranks: tuple[int, ...]
    #: The library's own handle.
    handle: Any = field(repr=False)
    _rank: int = field(default=-1, repr=False)

    def rank(self) -> int:
        """Return this process's rank in the group, from 0; -1 outside it, as torch does."""
        return self._rank

    def size(self) -> int:
        """Return the number of ranks."""
        return len(self.ranks)

    def __contains__(self, rank: int) -> bool:
        return rank in self.ranks

    def __deepcopy__(self, memo: object) -> Group:
        return self  # of a copied model or metric, too


class ComparedCall(NamedTuple):
    """A collective call, while the ranks compare it."""

    #: Name, dtype and shape of what is compared.
    call: dict[str, Any]
    #: That makes it.
    thread: int
    #: By ``time.monotonic()``.
    began: float


class Watcher(Protocol):
    """What knows the other ranks."""

    def explain(self, call: str, error: BaseException) -> tuple[str, str]:
        """Return the operation in which this rank has failed and its line in the user's code, and which ranks are
        missing and where the others are; the latter is empty where that is not known. Takes at most some 2 s.
        """


class Backend(ABC):
    """A backend that has been started."""

    #: Device types of tensors that the backend takes; others are copied to the CPU.
    device_types: frozenset[str] = frozenset({"cpu"})
    #: Dtypes that ``all_reduce`` takes; others are converted to wider ones.
    reducible: frozenset[torch.dtype] = frozenset({torch.float32, torch.float64, torch.int32, torch.int64})
    #: Whether the backend cannot start without a launcher.
    needs_launcher: ClassVar[bool] = False
    #: Whether a process that was forked from the rank can make its calls, as nothing else takes part in them.
    works_in_forks: ClassVar[bool] = False
    #: Seconds after which a call of the library has failed that waits and holds Python's lock; None: none does.
    lock_timeout: float | None = None
    #: Whether the ranks compare their calls before they make some of them, and whether before each (UNIDIST_CHECK).
    compares = True
    compares_all = False

    def __init__(self, name: str, topology: Topology, device: torch.device) -> None:
        self.name = name
        self.topology = topology
        self.device = device
        #: The process that made it, whose forked children are no ranks.
        self.pid = os.getpid()
        #: The groups made so far, by their ranks.
        self.groups: dict[tuple[int, ...], Group] = {}
        #: Bytes that ``all_gather`` sends along with the sizes, by group; the same on every rank of it.
        self.inline_bytes: dict[Group | None, int] = {}
        #: The call that this rank compares now.
        self.comparing: ComparedCall | None = None
        #: The number of calls that were or may have been compared, by group; the same on every rank of it.
        self.calls: dict[Group | None, int] = {}
        #: The block that waits for an operation now, by group.
        self.waiting: dict[Group | None, _ErrorsOf] = {}
        #: The last operations; None where the library keeps a record of them.
        self.recent: RecentOperations | None = RecentOperations()
        #: Where all ranks run, in rank order, and the job's secret; set by ``init`` in worlds of several ranks.
        self.processes: list[Process] = []
        self.secret = b""
        #: Asks the other ranks when a call has failed; None: nobody does.
        self.watch: Watcher | None = None

    @classmethod
    @abstractmethod
    def start(cls, name: str, start: Start) -> Backend:
        """Start the backend. Collective. Raises ``BackendError`` where it cannot."""

    @classmethod
    def adopt(cls, start: Start) -> Backend | None:
        """Return the backend that this process has started without unidist, or None. ``shutdown`` leaves it running."""
        return None

    @abstractmethod
    def shutdown(self) -> None:
        """Stop what ``start`` started. Collective."""

    def abort(self) -> None:  # noqa: B027 - a backend may have nothing that blocks
        """Make every call of this rank that is blocked in the library fail soon; the backend is useless afterwards.

        For a rank that waits for one that has stopped. Not collective; any thread. Afterwards ``shutdown``, and the end
        of the process, wait for no other rank. Horovod cannot be interrupted: there it does nothing.
        """

    def world_size(self) -> int:
        """Return the world size according to the library."""
        return self.topology.world_size

    def exchange(self, value: str, timeout: float | None = None) -> list[str]:
        """Return every rank's ``value``, in rank order, at a start: a rank may be gone. Collective.

        On torch.distributed it goes through the store of the rendezvous. Elsewhere the library's own timeout counts.

        Args:
            value: a short text.
            timeout: seconds. Default: that of ``init``.

        Raises:
            BackendError: not all ranks came in time; it names them.
        """
        data = torch.tensor(list(value.encode()), dtype=torch.uint8)
        sizes = self.all_gather(torch.tensor([data.numel()]), [1] * self.topology.world_size).tolist()
        parts = torch.split(self.all_gather(data, sizes), sizes)
        return [bytes(part.tolist()).decode() for part in parts]

    @abstractmethod
    def new_group(self, ranks: tuple[int, ...]) -> Group:
        """Make a group of some global ranks (ascending). Collective over the world, members or not.

        On torch.distributed it takes no part in anything: the members make the group in their first call that uses it.
        """

    def drop_group(self, group: Group) -> None:  # noqa: B027 - a backend may have nothing to free
        """Free the resources of a group that is not used any more. Not collective."""

    def barrier(self, group: Group | None = None) -> None:
        """Return once every rank of the group has called it. Collective."""
        self.start_all_reduce(torch.zeros(1), "sum", group, call="barrier")()

    def all_reduce(self, tensor: torch.Tensor, op: Op, group: Group | None = None) -> None:
        """Reduce ``tensor`` over the ranks, in place; ``mean`` for floating dtypes only. Collective."""
        self.start_all_reduce(tensor, op, group)()

    @abstractmethod
    def start_all_reduce(
        self, tensor: torch.Tensor, op: Op, group: Group | None = None, *, call: str = "all_reduce"
    ) -> Wait:
        """Start ``all_reduce``, also in half precision; the result waits for it. Collective.

        It returns at once, and other operations may be started before this one is waited for. ``call`` is what an error
        says that the user called.
        """

    @abstractmethod
    def start_broadcast(self, tensor: torch.Tensor, src: int, group: Group | None = None) -> Wait:
        """Start ``broadcast``; the result waits for it. Collective."""

    def broadcast(self, tensor: torch.Tensor, src: int, group: Group | None = None) -> None:
        """Overwrite ``tensor`` with that of global rank ``src``, in place; same shape everywhere. Collective."""
        self.start_broadcast(tensor, src, group)()

    @abstractmethod
    def all_gather(self, tensor: torch.Tensor, sizes: Sequence[int], group: Group | None = None) -> torch.Tensor:
        """Concatenate the ranks' 1-d tensors, of ``sizes[i]`` elements on the group's i-th rank. Collective."""

    @abstractmethod
    def all_to_all(
        self, tensor: torch.Tensor, send: Sequence[int], receive: Sequence[int], group: Group | None = None
    ) -> torch.Tensor:
        """Send ``send[i]`` elements of a 1-d tensor to the group's i-th rank, receive ``receive[i]``. Collective."""

    @abstractmethod
    def reduce_scatter(self, tensor: torch.Tensor, op: Op, group: Group | None = None) -> torch.Tensor:
        """Reduce a 1-d tensor of n * group-size elements; the i-th rank gets the i-th n elements. Collective."""

    def process_group(self, group: Group | None, device_type: str) -> Any:
        """Return torch's process group for DistributedDataParallel; None where the backend has none."""
        return None

    # ------------------------------------------------------------------ the same for every backend
    def ranks(self, group: Group | None) -> tuple[int, ...]:
        """Return the global ranks of a group, ascending."""
        return group.ranks if group else self._all_ranks

    @cached_property
    def _all_ranks(self) -> tuple[int, ...]:
        return tuple(range(self.topology.world_size))

    def quiesce(self) -> None:
        """Wait until the library's threads are idle, before this process forks or ends. Not collective.

        A thread that drops the last reference to a tensor needs the interpreter. If it does so while the interpreter
        shuts down, the process aborts (gloo of torch 2.13: 3 exits of 12); if it holds a lock of CPython 3.11 while the
        process forks, the lock stays locked in the child (Horovod: 16 of 4,000 children hung).
        """
        time.sleep(_QUIESCE_S)

    def operations(self) -> list[OperationRecord]:
        """Return this rank's pending operations, and the last ones that are done. Any thread, not collective."""
        return self.as_called(self.recent.records() if self.recent is not None else [])

    def as_called(self, records: list[OperationRecord]) -> list[OperationRecord]:
        """Return the records, where that of the comparison that is made has the call that is compared."""
        made = self.comparing
        if made is None:
            return records
        since = time.monotonic() - made.began

        def is_its(each: OperationRecord) -> bool:  # done or not: PyTorch's flight recorder counts what failed as done
            return (each.dtype, each.shape) == ("int64", (2,)) and each.seconds <= since

        return [each._replace(**made.call) if is_its(each) else each for each in records]

    def follows(self, error: BaseException, trace: TracebackType | None) -> bool:
        """Return whether an error is one of a collective call, so that another rank may have failed first."""
        return isinstance(error, CollectiveError) or type(error).__name__ == "HorovodInternalError"

    def explained(self, error: BaseException, trace: TracebackType | None) -> BaseException | None:
        """Return what is shown in place of an uncaught error of the library that this package has not converted; None:
        the error itself.
        """
        return None

    @property
    def label(self) -> str:
        """This rank, for error messages: ``rank 1 of 4 (gloo)``."""
        return f"rank {self.topology.rank} of {self.topology.world_size} ({self.name})"

    def failure(self, call: str, error: BaseException) -> CollectiveError:
        """Return the ``CollectiveError`` for a library's own error. Asks the other ranks, not for long."""
        hint = open_files.advice(self.topology.world_size) if open_files.EXHAUSTED in str(error) else ""
        if getattr(error, "is_explained", False):  # the backend has asked them
            return CollectiveError(f"{error}{hint}")
        reason = str(error).rstrip(".")
        if self.comparing is not None and self.comparing.thread == threading.get_ident():
            call = self.comparing.call["name"]
        what, others = call, ""
        if self.watch is not None:
            with suppress(Exception):  # which would hide the library's
                what, others = self.watch.explain(call, error)
        steps = "Use unidist.shard_loader, or train inside unidist.join."
        if others:
            if call in ("forward", "backward") and "without an exception" in others:
                hint += f" Has it had fewer batches? {steps}"
            return CollectiveError(f"{self.label}: {what}: {others}. The error of {self.name}: {reason}.{hint}")
        if call in ("forward", "backward") and not hint:
            hint = f" If none failed, a rank has made fewer steps. {steps}"
        return CollectiveError(
            f"{self.label}: {what} failed: {reason}. Another rank may have failed first, or made a different "
            f"call: look for the earliest error of all ranks.{hint}"
        )

    def errors_of(
        self,
        call: str,
        tensor: torch.Tensor | None = None,
        group: Group | None = None,
        began: Collective | None = None,
        *,
        waits: bool = True,
    ) -> AbstractContextManager[None]:
        """Convert the library's exceptions inside the block into a ``CollectiveError`` that names rank and call.

        Args:
            call: what the user has called, or ``backward``.
            tensor: of this rank; None: the block makes no operation.
            group: of the operation.
            began: the result of ``began`` where it is started and waited for in two blocks.
            waits: whether the operation is waited for inside the block; it has begun, then. One that is only started
                has not where the library refuses it.
        """
        return _ErrorsOf(self, call, tensor, group, began, waits)

    def began(self, call: str, tensor: torch.Tensor, group: Group | None) -> Collective | None:
        """Return a collective that this rank starts, for the timeline; None where none is on."""
        return spans.collective(call, self.ranks(group), tensor) if spans.on else None


class _ErrorsOf:
    # A class, not a generator: it adds little time to the hot path.
    def __init__(
        self,
        backend: Backend,
        call: str,
        tensor: torch.Tensor | None,
        group: Group | None,
        began: Collective | None,
        waits: bool,
    ) -> None:
        self.backend = backend
        self.call = call
        self.tensor = tensor
        self.group = group
        self.span = began
        self.waits = waits
        self.thread = threading.get_ident()
        self.entry = self._begin() if waits else None
        #: The second thread in this block's group, once there was one.
        self.mixed = ""

    def _begin(self) -> Entry | None:
        if self.backend.recent is None or self.tensor is None:
            return None
        return self.backend.recent.begin(self.call, () if self.group is None else self.group.ranks, self.tensor)

    def __enter__(self) -> None:
        if self.tensor is not None:
            self._refuse_second_thread()
        if not self.waits:
            return
        if self.span is not None:
            self.span.wait()
        elif spans.on and self.tensor is not None:
            self.span = self.backend.began(self.call, self.tensor, self.group)

    def _refuse_second_thread(self) -> None:
        """Raise if another thread waits for an operation of this group, and in each call after that.

        Operations of a group are matched by their order on each rank, which threads do not keep: one would get the
        other's values, in silence where dtypes and shapes agree.
        """
        waiting = self.backend.waiting
        # One call, so that no other thread comes in between.
        first = waiting.setdefault(self.group, self) if self.waits else waiting.get(self.group, self)
        if first is self or (first.thread == self.thread and not first.mixed):
            return
        if not first.mixed:
            self.mixed = threading.current_thread().name
            waiting[self.group] = first = self
        if self.entry is not None:
            self.entry.done = True  # not begun
        raise UnidistError(
            f"{self.backend.label}: thread {first.mixed!r} made a call of a group in which another thread waited. A "
            "group's calls are matched by their order, which threads do not keep, so that values may already be "
            "another call's: call from one thread, or in a group of other ranks."
        )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Literal[False]:
        if not self.waits:
            if error is None:
                return False
            self.entry = self._begin()  # what fails is this operation, not the one before
        if self.span is not None:
            self.span.end()
        try:
            if isinstance(error, Exception) and not isinstance(error, UnidistError):
                raise self.backend.failure(self.call, error) from error
            return False
        finally:
            if self.entry is not None:
                self.entry.done = True
            if self.backend.waiting.get(self.group) is self:
                del self.backend.waiting[self.group]
