"""A worker of an elastic run: its connection to ``unidist run``, which says who trains, and as which rank.

JSON objects go each way. A thread receives; it is in a call of the system, so nothing keeps it at the end of the
process. The worker asks for its place in the next generation, and trains until it is over: a member is lost, or
all members have agreed on a check of theirs, by its number, at which they end it.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from unidist import settings
from unidist.errors import CollectiveError, LaunchError
from unidist.network.connection import connect, frame

#: See ``connection.Hello``; its content: the worker's number.
PURPOSE = "elastic"
#: Seconds for the connection to the driver.
_CONNECT_S = 30.0
#: Seconds after an error in which the driver may say that a worker is lost.
VERDICT_S = 2.0


class Membership:
    """This process among the workers.

    Args:
        endpoint: the value of ``UNIDIST_ELASTIC``: the driver's address and port, this worker's number, and the run's
            key.
    """

    def __init__(self, endpoint: str) -> None:
        address, port, number, key = endpoint.split(" ")
        #: This worker's number, from 0 over the whole run.
        self.number = int(number)
        #: The generation whose member it is, and the numbers of all members in rank order; 0 before the first.
        self.generation = 0
        self.members: list[int] = []
        #: Is called, by another thread, when a member is lost: it ends the calls that wait for it.
        self.on_loss: Callable[[], None] = lambda: None
        self._changed = threading.Condition()
        self._place: dict[str, Any] | None = None
        #: Why there is no next generation for this worker, and whether that is as it should be.
        self._dismissed: tuple[str, bool] | None = None
        #: Who is lost of this generation.
        self._lost = ""
        #: The checks made in this generation; whether the next one waits for the number at which it ends; the number.
        self._checks = 0
        self._hold = False
        self._last_check: int | None = None
        try:
            content = {"worker": self.number}
            self._link, hello = connect((address, int(port)), bytes.fromhex(key), PURPOSE, content, _CONNECT_S)
            hello.answer(self._link.receive_one(_CONNECT_S))
        except (OSError, EOFError) as error:
            raise LaunchError(f"cannot connect to unidist run at {address}, port {port}: {error}.") from error
        threading.Thread(target=self._receive, name="unidist-elastic", daemon=True).start()

    def ask(self, failed: str = "") -> None:
        """Ask for the next generation, and wait for it; ``take`` begins it.

        Args:
            failed: the error by which this generation has ended for this worker; empty: it was interrupted.

        Raises:
            SystemExit: this worker is not needed any more. Its status is 0.
            LaunchError: there will be no next generation; it says why.
        """
        with self._changed:
            if self._place is not None:
                return
            self._send(ask=self.generation, failed=failed)
            while self._place is None and self._dismissed is None:
                self._changed.wait(1.0)  # with an end, so that signals are handled
            if self._dismissed is not None:
                why, well = self._dismissed
                raise SystemExit(0) if well else LaunchError(why)

    def take(self) -> None:
        """Begin the next generation: its variables, such as RANK and WORLD_SIZE, are in ``os.environ`` then."""
        self.ask()
        with self._changed:
            place, self._place = self._place, None
            assert place is not None
            self.generation, self.members = place["generation"], place["members"]
            self._checks = 0
            self._lost, self._hold = place.get("lost", ""), "hold" in place
            self._last_check = place.get("last_check")
        os.environ.update(place["env"])

    @property
    def checks(self) -> int:
        """How often ``check`` was called in this generation."""
        return self._checks

    def lost(self, wait: float = 0.0) -> str:
        """Return who is lost of this generation, as far as the driver says within ``wait`` seconds; empty: nobody."""
        with self._changed:
            self._changed.wait_for(lambda: self._lost, wait)
            return self._lost

    def report_silent(self, ranks: Sequence[int]) -> None:
        """Tell the driver that members of this generation do not answer while others wait for them: it has those killed
        that are stopped.
        """
        with self._changed:
            numbers = [self.members[rank] for rank in ranks]
            self._send(generation=self.generation, silent=numbers)

    def check(self) -> bool:
        """Return whether the generation ends here: on all members in their check of the same number.

        Costs no message, unless workers are to come or leave: then the driver asks all members how many checks they
        have made, and names a number that all of them will reach.

        Raises:
            CollectiveError: a member is lost.
        """
        with self._changed:
            self._checks += 1
            while self._hold and self._last_check is None and not self._lost:
                self._changed.wait(1.0)
            if self._lost:
                raise CollectiveError(self._lost)
            return self._last_check is not None and self._checks >= self._last_check

    # ---------------------------------------------------------------------------------------------
    def _send(self, **message: Any) -> None:
        with suppress(OSError):  # _receive notices it
            self._link.send(frame(json.dumps(message).encode()))

    def _receive(self) -> None:
        with suppress(OSError, EOFError):
            while True:
                for data in self._link.receive_some():
                    self._take_message(json.loads(data))
        with self._changed:
            self._dismissed = self._dismissed or ("the connection to unidist run is lost: has it ended?", False)
            self._changed.notify_all()

    def _take_message(self, message: dict[str, Any]) -> None:
        with self._changed:
            lost = ""
            if "place" in message:
                self._place = message["place"]
            elif "dismissed" in message:
                self._dismissed = (message["dismissed"], message["well"])
            elif self._place is not None and message["generation"] == self._place["generation"]:
                self._place.update(message)  # for ``take``
                if "hold" in message:
                    self._send(generation=message["generation"], checks=0)
            elif message["generation"] == self.generation:
                if "lost" in message:
                    self._lost = lost = message["lost"]
                elif "last_check" in message:
                    self._last_check = message["last_check"]
                else:
                    self._hold = True
                    self._send(generation=self.generation, checks=self._checks)
            self._changed.notify_all()
        if lost:
            self.on_loss()


_membership: Membership | None = None
_lock = threading.Lock()


def current(env: Mapping[str, str] = os.environ) -> Membership | None:
    """Return this process's membership; None where it is no worker of an elastic run."""
    global _membership
    if _membership is None and (endpoint := env.get(settings.ELASTIC)):
        with _lock:
            _membership = _membership or Membership(endpoint)
    return _membership
