"""Starting Ray on a host that has much else to do."""

from collections.abc import Callable
from functools import partial
from typing import TypeVar

from ray.cluster_utils import Cluster

T = TypeVar("T")
#: How often a node is started at most.
_TRIES = 3


def start_ray(start: Callable[[], T]) -> T:
    """Call ``start``, which starts a node of Ray, again where Ray's own time for it was too short.

    Ray ends a node whose agents have not started after 15 s, which no setting changes: its issue 65983.
    """
    for _ in range(_TRIES - 1):
        try:
            return start()
        except Exception as error:
            if "timed out during startup" not in str(error):
                raise
    return start()


def start_cluster() -> Cluster:
    """Start a cluster of one node, with two CPUs."""
    head = {"num_cpus": 2, "include_dashboard": False}
    return start_ray(partial(Cluster, initialize_head=True, head_node_args=head))
