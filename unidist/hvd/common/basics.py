"""``horovod.common.basics``: Horovod's basic calls as methods of an object."""

from __future__ import annotations

from unidist.hvd import basics

__all__ = ["HorovodBasics"]


class HorovodBasics:
    """The calls that need no tensors.

    Args:
        pkg_path, args: where Horovod's compiled extension would be; of no effect.
    """

    def __init__(self, pkg_path: str = "", *args: str) -> None:
        for name in basics.__all__:
            setattr(self, name, getattr(basics, name))
