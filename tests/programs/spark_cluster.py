"""``unidist.spark.run`` on a cluster of two executors, which are processes of this host."""

import os
import signal
import sys
from pathlib import Path

from pyspark.sql import SparkSession

import unidist.spark
from unidist.errors import UnidistError


def where(directory: str) -> tuple[int, ...]:
    import unidist

    unidist.init()
    unidist.barrier()
    print("GPUS", os.environ["CUDA_VISIBLE_DEVICES"])
    from horovod.spark.task import get_available_devices  # of the drop-in

    print("OWN", get_available_devices())
    return unidist.rank(), unidist.local_rank(), unidist.local_size(), unidist.node_rank(), unidist.num_nodes()


def lose(directory: str) -> None:
    """Rank 1's task is killed; an attempt leaves a file."""
    import unidist

    unidist.init()
    open(f"{directory}/{os.getpid()}", "w").close()
    if unidist.rank() == 1:
        os.kill(os.getppid(), signal.SIGKILL)
    unidist.barrier()


def train(directory: str) -> tuple[int, float]:
    """Rank 1's task is killed at the third of five steps, with a step that is not committed."""
    import torch

    import unidist

    unidist.init()
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    state = unidist.elastic.TorchState(model=model, step=0)

    @unidist.elastic.run
    def run(state: unidist.elastic.TorchState) -> tuple[int, float]:
        while state.step < 5:
            unidist.barrier()
            with torch.no_grad():
                model.weight += 1
            state.step += 1
            mark = Path(directory, "lost")
            if state.step == 3 and unidist.rank() == 1 and not mark.exists():
                mark.touch()
                os.kill(os.getppid(), signal.SIGKILL)
                unidist.barrier()
            state.commit()
        return unidist.rank(), model.weight.item()

    return run(state)


if __name__ == "__main__":
    # Each executor has a GPU of another address.
    script = Path(sys.argv[1], "gpus.sh")
    script.write_text("""#!/bin/sh\necho '{"name": "gpu", "addresses": ["'$$'"]}'\n""")
    script.chmod(0o700)
    builder = SparkSession.builder.master("local-cluster[2,1,1024]").config("spark.ui.enabled", False)
    builder = builder.config("spark.worker.resource.gpu.discoveryScript", str(script))
    for part in ("worker", "executor", "task"):
        builder = builder.config(f"spark.{part}.resource.gpu.amount", 1)
    spark = builder.getOrCreate()
    print("PLACES", unidist.spark.run(where, sys.argv[1:], num_proc=2))
    try:
        unidist.spark.run(lose, sys.argv[1:], num_proc=2)
    except UnidistError as error:
        print("LOST", error)
    print("ELASTIC", unidist.spark.run_elastic(train, sys.argv[1:], min_num_proc=1, max_num_proc=2))
    spark.stop()
