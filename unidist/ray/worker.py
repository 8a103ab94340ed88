"""The actor class of the workers, and where they run."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import ray
from ray.util import inspect_serializability

from unidist.errors import UnidistError
from unidist.horovod_names import export_directory


class Location(NamedTuple):
    """Where a worker runs."""

    #: Ray's id of the node, and the node's address.
    node: str
    address: str
    #: The GPUs that Ray has given it, by their numbers on the node.
    gpus: tuple[str, ...]


class BaseHorovodWorker:
    """A process that is one rank of a ``RayExecutor``: a class for ``ray.remote``, with Horovod's methods.

    Args:
        world_rank: of no effect: ranks follow from where Ray starts the workers.
        world_size: likewise.
    """

    executable: Any = None
    _store: Any = None

    def __init__(self, world_rank: int = 0, world_size: int = 1) -> None:
        self._name = "worker"

    def __repr__(self) -> str:  # Ray shows it in the text of errors
        return self._name

    def locate(self) -> Location:
        """Make ``horovod`` the drop-in, before anything is unpickled here, and say where this is."""
        from unidist.hvd import alias  # it imports torch, and who starts workers needs none

        alias.install()
        export_directory()
        return Location(self.node_id(), ray.util.get_node_ip_address(), tuple(map(str, self.get_gpu_ids())))

    def serve(self) -> int:
        """Serve torch's key-value store at the node's address; the port."""
        from unidist.backends import rendezvous

        self._store = rendezvous.open_on_free_port(ray.util.get_node_ip_address())
        port: int = self._store.port
        return port

    def join(self, variables: Mapping[str, str], name: str) -> None:
        """Take the variables of a rank, and what it is called in errors."""
        from unidist.hvd import names

        self.update_env_vars(variables)
        names.export_variables()
        self._name = name

    def start_executable(
        self,
        executable_cls: type | None = None,
        executable_args: Sequence[Any] | None = None,
        executable_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Make the object that ``execute`` passes on; without a class, None."""
        if executable_cls is not None:
            self.executable = executable_cls(*(executable_args or ()), **(executable_kwargs or {}))

    def execute(self, func: Callable[[Any], Any]) -> Any:
        """Call a function with the object."""
        return func(self.executable)

    def update_env_vars(self, env_vars: Mapping[str, object]) -> None:
        """Set variables of this process's environment."""
        os.environ.update({name: str(value) for name, value in env_vars.items()})

    def env_vars(self) -> dict[str, str]:
        """Return this process's environment."""
        return dict(os.environ)

    def node_id(self) -> str:
        """Return Ray's id of the node."""
        return str(ray.get_runtime_context().get_node_id())

    def hostname(self) -> str:
        """Return the name of the host."""
        return socket.gethostname()

    def get_gpu_ids(self) -> list[Any]:
        """Return the GPUs that Ray has given this process."""
        return list(ray.get_gpu_ids())


def resources(cpus: float, use_gpu: bool, gpus: int | None) -> dict[str, float]:
    """Return the CPUs and GPUs of each worker, by Ray's names.

    Raises:
        ValueError: neither CPUs nor GPUs, GPUs without ``use_gpu``, or none with it.
    """
    if cpus < 0 or (cpus == 0 and not use_gpu):
        raise ValueError(f"{cpus} CPUs each with use_gpu={use_gpu}: give a number from 1 up, or from 0 up with GPUs.")
    if gpus is not None and (gpus < 1 if use_gpu else gpus != 0):
        raise ValueError(f"{gpus} GPUs each with use_gpu={use_gpu}: give a number from 1 up, and use_gpu=True.")
    return {"CPU": cpus, "GPU": (gpus or 1) if use_gpu else 0}


def put(call: str, value: object) -> Any:
    """Return a reference to what all workers get.

    Raises:
        UnidistError: it does not pickle.
    """
    try:
        return ray.put(value)
    except Exception as error:
        parts = value.args if isinstance(value, partial) else (value,)
        with open(os.devnull, "w") as nowhere:
            found = set().union(*(inspect_serializability(part, "it", print_file=nowhere)[1] for part in parts))
        named = ", ".join(sorted({f"{_variable(each)} ({type(each.obj).__name__})" for each in found}))
        raise UnidistError(
            f"RayExecutor.{call}({getattr(parts[0], '__qualname__', parts[0])}): the workers cannot have this function "
            f"or its arguments, as {named or 'a part of it'} does not pickle: make it inside the "
            "function instead, or pass what it is made of."
        ) from error


def _variable(failure: Any) -> str:
    """Return what is called so in the code; Ray before 2.50 has the name, later the path to it."""
    return str(failure.path[-1] if hasattr(failure, "path") else failure.name)
