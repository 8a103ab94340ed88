"""The exceptions of ``horovod.common.exceptions``."""

from __future__ import annotations

from unidist.errors import HostsUpdatedInterrupt as HostsUpdatedInterrupt
from unidist.hvd.errors import HorovodInternalError as HorovodInternalError


class HorovodVersionMismatchError(ImportError):
    """A framework has another version than at installation; never raised here.

    Args:
        name: of the framework.
        version: that was found.
        installed_version: at installation.
    """

    def __init__(self, name: str, version: str, installed_version: str) -> None:
        super().__init__(f"{name} {version} was found where {installed_version} was installed")
        self.name = name
        self.version = version
        self.installed_version = installed_version
