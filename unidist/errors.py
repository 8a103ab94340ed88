"""The exceptions of unidist.

Each message says what happened, the value that caused it, and the remedy.
"""

from __future__ import annotations


class UnidistError(RuntimeError):
    """Base of every error of this package."""


class LaunchError(UnidistError):
    """The launcher's environment variables are incomplete or contradict each other."""


class NotInitializedError(UnidistError, ValueError):
    """A call that needs a world came before ``unidist.init()``. A ``ValueError`` too, as Horovod's and PyTorch's
    are.
    """


class BackendError(UnidistError):
    """The backend cannot be started here, or cannot do what was asked."""


class WorldSizeError(UnidistError):
    """The backend's world size is not the launcher's."""


class MismatchError(UnidistError):
    """The ranks passed arguments to a collective call that do not match."""


class CollectiveError(UnidistError):
    """The backend failed in a collective: a lost rank, a timeout, a network error."""


class CheckpointError(UnidistError):
    """A checkpoint could not be written or loaded, on this rank or on another."""


class HostsUpdatedInterrupt(RuntimeError):
    """Workers are to come or leave: no error, ``unidist.elastic.run`` and ``hvd.elastic.run`` handle it.

    Args:
        skip_sync: of no effect: the state is always synchronized.
    """

    def __init__(self, skip_sync: bool) -> None:
        super().__init__(skip_sync)
        self.skip_sync = skip_sync
