"""A backend on top of another one: what does not concern it goes to the one below."""

from __future__ import annotations

from typing import NoReturn

from unidist.backends.base import Backend, Group, Start
from unidist.diagnosis.operations import OperationRecord


class Layer(Backend):
    """The base of backends that change some calls of another one."""

    def __init__(self, backend: Backend) -> None:
        super().__init__(backend.name, backend.topology, backend.device)
        self.device_types = backend.device_types
        self.reducible = backend.reducible
        self.groups = backend.groups
        self.inline_bytes = backend.inline_bytes
        self.processes, self.secret = backend.processes, backend.secret
        self._backend = backend

    @classmethod
    def start(cls, name: str, start: Start) -> NoReturn:
        raise NotImplementedError(f"{cls.__name__} is made on top of a running backend")

    @classmethod
    def adopt(cls, start: Start) -> None:
        return None

    def shutdown(self) -> None:
        self._backend.shutdown()

    def abort(self) -> None:
        self._backend.abort()

    def quiesce(self) -> None:
        self._backend.quiesce()

    def world_size(self) -> int:
        return self._backend.world_size()

    def operations(self) -> list[OperationRecord]:
        return self._backend.operations()

    def exchange(self, value: str, timeout: float) -> list[str]:
        return self._backend.exchange(value, timeout)

    def drop_group(self, group: Group) -> None:
        self._backend.drop_group(group)
