"""Ranks in the tasks of a Spark job: ``run`` and ``run_elastic``, which are those of ``horovod.spark`` without Horovod.

Spark schedules, places and ends the tasks; each starts one process, which is a rank. See docs/spark.md.
"""

from unidist.spark.runner import run, run_elastic

__all__ = ["run", "run_elastic"]
