"""Whether programs of this process use the drop-in by Horovod's names, and what they find then."""

from __future__ import annotations

import os
import sys

from unidist.errors import LaunchError
from unidist.horovod_names import directory as directory
from unidist.launch.topology import NONE, detect

#: The release whose calls these are.
VERSION = "0.28.1"


def is_installed() -> bool:
    """Return whether ``horovod`` means the drop-in in this process."""
    return any(type(finder).__module__ == "unidist.hvd.alias" for finder in sys.meta_path)


def export_variables() -> None:
    """Set Horovod's variables to what the launcher declares. Nothing reads them here, but frameworks do."""
    try:
        launch = detect(os.environ)
    except LaunchError:  # init() raises it
        return
    if launch.launcher is NONE:
        return
    node = (launch.node_rank, launch.num_nodes)
    if launch.local_size == launch.world_size:
        node = (0, 1)
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
    values = (launch.rank, launch.world_size, launch.local_rank, launch.local_size, *node)
    os.environ.update({f"HOROVOD_{name}": str(value) for name, value in zip(names, values) if value is not None})
