"""Ranks in the tasks of a Spark job: ``unidist.spark.run``, which is ``horovod.spark.run`` without Horovod.

Spark schedules, places and ends the tasks; each starts one process, which is a rank. See docs/spark.md.
"""

from unidist.spark.runner import run

__all__ = ["run"]
