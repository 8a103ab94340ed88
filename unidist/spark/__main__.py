"""``python -m unidist.spark N [-m MODULE | SCRIPT] ARGS...``: run a program in N tasks of Spark.

Under ``spark-submit`` they are in its cluster, otherwise on this host.
"""

import os
import sys

from pyspark import SparkConf, SparkContext

from unidist.launchers.spawned import exported, run
from unidist.spark.runner import run as run_in_tasks

if __name__ == "__main__":
    count = int(sys.argv[1])
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    conf = SparkConf()
    SparkContext(conf=conf.setIfMissing("spark.master", f"local[{count}]").setIfMissing("spark.app.name", "unidist"))
    run_in_tasks(run, [sys.argv[2:]], num_proc=count, env=exported())
