"""The GPUs of a rank's task, by the name that Horovod has for them."""

from __future__ import annotations

import os

#: How many Spark has given the task of a rank.
GPUS = "SPARK_RANK_GPUS"


def get_available_devices() -> list[str]:
    """Return the GPUs that Spark has given this rank, as ``torch.cuda`` counts them here. In a rank.

    Without GPU scheduling, and outside of a rank, it is empty.
    """
    first, step = (int(os.environ.get(name, default)) for name, default in (("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 1)))
    return [str(first + step * number) for number in range(int(os.environ.get(GPUS, 0)))]
