"""``python -m unidist.ray N [-m MODULE | SCRIPT] ARGS...``: run a program in N workers of Ray.

They are in the cluster that RAY_ADDRESS names. Without it, Ray is started on this host.
"""

import os
import sys

os.environ.setdefault("RAY_DEDUP_LOGS", "0")  # ranks print the same
os.environ.setdefault("RAY_worker_niceness", "0")  # not 15, with which other processes come first

import ray

from unidist.launchers.spawned import exported, run
from unidist.ray.runner import RayExecutor

if __name__ == "__main__":
    count = int(sys.argv[1])
    own = {"address": "local", "num_cpus": count, "include_dashboard": False}  # not one that is found on this host
    ray.init(**({} if "RAY_ADDRESS" in os.environ else own))
    executor = RayExecutor(num_workers=count)
    executor.start(extra_env_vars=exported())
    executor.run(run, [sys.argv[2:]])
    executor.shutdown()
