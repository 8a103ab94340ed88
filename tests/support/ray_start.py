"""Starting Ray on a host that has much else to do."""

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def start_ray(start: Callable[[], T], tries: int = 3) -> T:
    """Call ``start``, which starts a node of Ray, again where Ray's own time for it was too short.

    Ray ends a node whose agents have not started after 15 s, which no setting changes: its issue 65983.
    """
    for _ in range(tries - 1):
        try:
            return start()
        except Exception as error:
            if "timed out during startup" not in str(error):
                raise
    return start()
