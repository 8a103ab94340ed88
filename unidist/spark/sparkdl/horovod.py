"""Databricks' ``sparkdl.horovod.log_to_driver``."""

import sys

#: Begins each line.
MARK = "[log_to_driver] "
_LONGEST = 4000


def log_to_driver(message: str) -> None:
    """Print a message on the driver, whatever ``driver_log_verbosity`` is; of a long one the first 4000 characters."""
    # In one write, as processes of one host may share the stream.
    sys.stdout.write("".join(f"{MARK}{line}\n" for line in message[:_LONGEST].splitlines()))
    sys.stdout.flush()
