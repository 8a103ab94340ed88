"""The exceptions that unidist raises on purpose.

Each message says what happened, the value that caused it, and the remedy.
"""

from __future__ import annotations


class UnidistError(RuntimeError):
    """Base of every error of this package."""


class LaunchError(UnidistError):
    """The launcher's environment variables contradict themselves or lack something."""


class NotInitializedError(UnidistError, ValueError):
    """A call that needs a world came before ``unidist.init()``. A ``ValueError`` too, as Horovod's and PyTorch's are."""


class BackendError(UnidistError):
    """The backend cannot be started here, or cannot do what was asked."""


class WorldSizeError(UnidistError):
    """The engine's world and the launcher's declaration differ in size."""


class MismatchError(UnidistError):
    """The ranks of a collective call passed arguments that do not fit together."""


class CollectiveError(UnidistError):
    """The engine failed inside a collective: a lost peer, a timeout, a broken link."""


class CheckpointError(UnidistError):
    """A checkpoint could not be written or loaded, on this rank or on another."""
