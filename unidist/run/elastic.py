"""Who trains, and as which rank: the decisions of an elastic run. Pure: it is told what happens, and when.

The workers train in generations. A generation ends when one of its members is lost, or all have agreed to end it, and
the next one begins when all members that are left have asked for it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from unidist.run.hosts import HostSlots, Place

#: A host is blacklisted when a slot of it has failed so often within so many seconds.
FAILURES = 3
FAILURES_WITHIN_S = 600.0
#: Seconds for which newcomers that are ready wait for others that are starting.
GATHER_S = 10.0


class OptionNames(NamedTuple):
    """What sets the limits, for errors."""

    num_proc: str = "-np"
    min_np: str = "--min-np"
    timeout: str = "--elastic-timeout"
    reset_limit: str = "--reset-limit"


@dataclass(frozen=True)
class Limits:
    """The options of an elastic run."""

    min_np: int
    max_np: int | None = None
    #: The least number of workers of the first generation. Default: ``min_np``.
    num_proc: int | None = None
    #: How many generations there may be after the first; None: any number.
    reset_limit: int | None = None
    #: Seconds that workers wait for the others that are needed.
    timeout: float = 600.0
    #: Seconds that members wait, after a loss, for one that does not come: it hangs, and is killed.
    grace: float = 60.0
    #: The shortest and the longest time in seconds that a host stays blacklisted; None: for ever.
    cooldown: tuple[float, float] | None = None
    options: OptionNames = field(default_factory=OptionNames)


@dataclass(eq=False)
class Worker:
    """A process."""

    #: Counted from 0 over the whole run.
    number: int
    #: It keeps its local rank, and with it its GPU.
    place: Place
    #: When it asked for the next generation; None: it trains, or is starting.
    asked: float | None = None
    #: Whether its host or slot is not there any more.
    leaving: bool = False
    #: Whether it has been sent away: it ends, also when its slot comes back.
    dismissed: bool = False


@dataclass
class _Host:
    #: When each slot has failed.
    failures: dict[int, list[float]] = field(default_factory=dict)
    #: How often it has been blacklisted, and until when it is.
    times: int = 0
    until: float = 0.0


class Elastic:
    """The state of an elastic run. ``now`` is in seconds, of any clock.

    Args:
        limits: the options.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        #: The running generation, or the last one; 0 before the first.
        self.generation = 0
        #: Its members that are left, in rank order.
        self.members: list[Worker] = []
        #: All processes: members, and newcomers.
        self.workers: dict[int, Worker] = {}
        #: Whether the training has ended on some rank: nothing starts any more.
        self.finishing = False
        self._slots: list[HostSlots] = []
        self._hosts: dict[str, _Host] = {}
        self._started = 0
        self._failed = False
        #: Whether the generation has ended, since when workers wait for the next one, and since when after a failure.
        self._over = True
        self._waiting_since: float | None = None
        self._failed_at: float | None = None

    # ------------------------------------------------------------------------------ what happens
    def set_hosts(self, hosts: Sequence[HostSlots]) -> None:
        """Set the hosts that there are; those that were there before come first."""
        order = {host.name: index for index, host in enumerate(self._slots)}
        self._slots = sorted(hosts, key=lambda host: order.get(host.name, len(order)))
        for host in hosts:
            self._hosts.setdefault(host.name, _Host())
        places = self._places()
        for worker in self.workers.values():
            worker.leaving = worker.place not in places or (worker.leaving and worker.dismissed)

    def start(self, now: float) -> list[Worker]:
        """Return new workers, for slots that have none; the caller starts them."""
        if self.finishing or not self._may_reset or (self._failed and not self.generation and not self._ready()):
            return []
        taken = {worker.place for worker in self.workers.values()}
        room = (self.limits.max_np or math.inf) - sum(not worker.leaving for worker in self.workers.values())
        found: list[Worker] = []
        for place in self._places():
            if place not in taken and len(found) < room and not self.is_blacklisted(place.host, now):
                worker = self.workers[self._started] = Worker(self._started, place)
                self._started += 1
                found.append(worker)
        return found

    def ask(self, number: int, now: float, *, failed: bool) -> None:
        """Record that a worker asks for the next generation: it is new, was interrupted, or a call of it has failed."""
        worker = self.workers.get(number)
        if worker is None:
            return
        worker.asked = now
        if worker in self.members:
            self._over = True
            if failed and self._failed_at is None:
                self._failed_at = now

    def end(self, number: int, status: int, now: float) -> bool:
        """Record that a worker has ended; return whether that is a failure."""
        worker = self.workers.pop(number, None)
        if worker is None:
            return False
        was_member = worker in self.members
        if was_member:
            self.members.remove(worker)
        if worker.leaving and worker.dismissed:
            self._failed = False  # it had come to its init()
            return False
        if status == 0 and (self.finishing or was_member or not self.generation):
            self.finishing = True
            return False
        if not was_member and (worker.leaving or (self.finishing and self.generation)):
            return False  # nobody waits for it
        if was_member:
            self._over, self._waiting_since = True, None
            self._failed_at = now if self._failed_at is None else self._failed_at
        if not worker.leaving:
            self._failed = True
            self._count_failure(worker.place, now)
        return True

    # ------------------------------------------------------------------------------ what follows
    def form(self, now: float) -> list[Worker] | None:
        """Return the members of the next generation in rank order, if it begins now."""
        ready = self._ready()
        if self._waiting_since is None and self._over and (ready or len(self._left()) < self._needed):
            self._waiting_since = now
        if not self._over or self.finishing or not self._may_reset or any(m.asked is None for m in self.members):
            return None
        if len(ready) < self._needed or (self.generation and not self.members):
            return None
        if not self.generation and self._gathers(ready[self._needed - 1 :], now):
            return None
        ready = ready[: self.limits.max_np]
        if self.members and not any(worker in self.members for worker in ready):
            ready.insert(0, self.members[0])  # all leave: one does so when the new ones have the state from it
        # Those that have been there keep their order, and the lowest ranks: the new ranks get the state from them.
        hosts = list(dict.fromkeys(place.host for place in self._places()))
        news = [worker for worker in ready if worker not in self.members]
        news.sort(key=lambda worker: (hosts.index(worker.place.host), worker.place.local_rank))
        self.members = [worker for worker in self.members if worker in ready] + news
        for worker in self.members:
            worker.asked = None
        self.generation += 1
        self._over, self._waiting_since, self._failed_at = False, None, None
        return self.members

    def dismiss(self) -> list[Worker]:
        """Return workers that wait, and for which there is no next generation; the caller tells them."""
        stays = any(not member.leaving for member in self.members)
        found = []
        for worker in self.workers.values():
            goes = self.finishing or (worker.leaving and (stays or worker not in self.members))
            if goes and worker.asked is not None and not worker.dismissed:
                worker.dismissed = True
                found.append(worker)
        self.members = [member for member in self.members if not (member.leaving and member.dismissed)]
        return found

    def changes(self, now: float) -> bool:
        """Return whether the running generation is to end, so that workers come or leave."""
        if self._over or self.finishing or not self._may_reset:
            return False
        ready = self._ready()
        return any(member.leaving for member in self.members) or (bool(ready) and not self._gathers(ready, now))

    def hung(self, now: float) -> list[Worker]:
        """Return the members for which the others have waited too long."""
        asked = [member.asked for member in self.members if member.asked is not None]
        if not asked:  # nobody waits who has the state
            return []
        since, timeout = min(asked), self.limits.timeout
        if self._failed_at is not None:
            since, timeout = max(since, self._failed_at), self.limits.grace
        return [member for member in self.members if member.asked is None and now - since > timeout]

    def why_over(self, now: float) -> str | None:
        """Return why the run cannot go on; None if it can, or has ended well."""
        if self.finishing:
            return None
        left = self._left()
        if self.generation and not self.members:
            return f"no worker of generation {self.generation} is left, and with them what they had committed"
        if not self.generation and self._failed and not self.workers:
            return "all workers have failed"
        if not self._over:
            return None
        options = self.limits.options
        if not self._may_reset:
            return (
                f"generation {self.generation} is over, and {options.reset_limit} {self.limits.reset_limit} allows no "
                "further change of the workers"
            )
        option = options.min_np if self.generation else options.num_proc
        need = f"{self._needed} workers are needed ({option}), and {len(left)} are left"
        if len(left) < self._needed and self._hosts and all(map(self._is_for_ever, self._hosts)):
            return f"all hosts are blacklisted after {FAILURES} failures of a slot: {need}"
        ready = self._ready()
        late = [member for member in self.members if member.asked is None]
        # For members that are late while others wait, see ``hung``.
        stuck = len(late) == len(self.members) if late else len(ready) < self._needed
        if stuck and self._waiting_since is not None and now - self._waiting_since > self.limits.timeout:
            return (
                f"{need}: {len(ready)} were ready within {self.limits.timeout:g} s. Are there enough hosts and "
                f"slots? {options.timeout} is how long they are waited for, {options.min_np} how many are needed"
            )
        return None

    def is_blacklisted(self, host: str, now: float) -> bool:
        """Return whether no worker is started on a host, for it has failed too often."""
        return self._is_for_ever(host) or (host in self._hosts and self._hosts[host].until > now)

    def how_long(self, host: str, now: float) -> str:
        """Return for how long a blacklisted host stays so, for a message."""
        return " any more" if self._is_for_ever(host) else f" for {self._hosts[host].until - now:.0f} s"

    # ---------------------------------------------------------------------------------------------
    @property
    def _needed(self) -> int:
        """The least size of the next generation."""
        return self.limits.min_np if self.generation else max(self.limits.num_proc or 0, self.limits.min_np)

    @property
    def _may_reset(self) -> bool:
        limit = self.limits.reset_limit
        return limit is None or self.generation <= limit

    def _places(self) -> list[Place]:
        return [Place(host.name, local) for host in self._slots for local in range(host.slots)]

    def _left(self) -> list[Worker]:
        return [worker for worker in self.workers.values() if not worker.leaving]

    def _ready(self) -> list[Worker]:
        """Workers that wait for the next generation, in the order in which they asked; members first."""
        ready = [worker for worker in self.workers.values() if worker.asked is not None and not worker.leaving]
        return sorted(ready, key=lambda worker: (worker not in self.members, worker.asked))

    def _gathers(self, ready: Sequence[Worker], now: float) -> bool:
        """Return whether more newcomers are worth waiting for."""
        starting = [
            worker
            for worker in self.workers.values()
            if worker.asked is None and not worker.leaving and worker not in self.members
        ]
        return bool(starting) and now - min(worker.asked for worker in ready if worker.asked is not None) < GATHER_S

    def _count_failure(self, place: Place, now: float) -> None:
        host = self._hosts[place.host]
        recent = [at for at in host.failures.get(place.local_rank, []) if now - at < FAILURES_WITHIN_S]
        host.failures[place.local_rank] = [*recent, now]
        if len(host.failures[place.local_rank]) < FAILURES:
            return
        host.failures.clear()
        host.times += 1
        host.until = math.inf
        if self.limits.cooldown is not None:
            shortest, longest = self.limits.cooldown
            host.until = now + min(shortest * 2 ** (host.times - 1), longest)

    def _is_for_ever(self, host: str) -> bool:
        return host in self._hosts and self._hosts[host].until == math.inf
