"""What survives: the state of a training, its commits, and how new workers get it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch

from unidist.collectives.operations import all_gather_object, broadcast_object
from unidist.elastic import host_memory
from unidist.errors import HostsUpdatedInterrupt
from unidist.launch import membership
from unidist.training.model import broadcast_model_state, broadcast_optimizer_state, is_wrapped


class State:
    """The base of states: a subclass says how to save, restore and synchronize."""

    def __init__(self) -> None:
        self._reset_callbacks: list[Callable[[], Any]] = []

    def register_reset_callbacks(self, callbacks: Sequence[Callable[[], Any]]) -> None:
        """Call these functions each time after the workers have changed, before ``sync``: to scale a learning rate
        by the new world size, for example.
        """
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Call ``reset`` and the callbacks: the workers have changed."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def commit(self) -> None:
        """Call ``save`` and ``check_host_updates``. Every rank must call it equally often.

        What comes after the last commit is lost when a worker is; a commit copies the state.

        Raises:
            HostsUpdatedInterrupt: on all ranks in the same call.
        """
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Let workers come or leave here, if some are to. Every rank must call it equally often.

        It costs no message while none are.

        Raises:
            HostsUpdatedInterrupt: on all ranks in the same call; ``run`` handles it.
            CollectiveError: a worker is lost.
        """
        member = membership.current()
        if member is not None and member.check():
            raise HostsUpdatedInterrupt(False)

    def save(self) -> None:
        """Copy the state, in memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Return to the last copy."""
        raise NotImplementedError

    def sync(self) -> None:
        """Give every rank the same state: that of the one with the latest commit. Collective."""
        raise NotImplementedError

    def reset(self) -> None:
        """Adapt to the workers, which have changed; called before ``sync``."""


class ObjectState(State):
    """Python objects, as attributes of the state.

    Args:
        kwargs: their names and values; what can be copied (``copy.deepcopy``) and pickled.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__()
        self._saved = kwargs
        #: How often the state was saved, in all worlds.
        self._commits = 0
        self._set_attributes(kwargs)

    def save(self) -> None:
        """Copy the attributes."""
        self._saved = {name: self._copy(name) for name in self._saved}
        self._commits += 1

    def restore(self) -> None:
        """Give the attributes the values of the last commit, also where an object was changed in place."""
        self._set_attributes(copy.deepcopy(self._saved))

    def sync(self) -> None:
        """Give every rank the attributes of the one with the latest commit. Collective."""
        self._sync_from(self._latest())

    def _latest(self) -> int:
        """Return the first rank with the latest commit: new workers have none. Collective."""
        commits = all_gather_object(self._commits)
        self._commits = max(commits)
        return commits.index(self._commits)

    def _sync_from(self, src: int) -> None:
        self._saved = broadcast_object({name: getattr(self, name) for name in self._saved}, src)
        self._set_attributes(copy.deepcopy(self._saved))

    def _copy(self, name: str) -> Any:
        try:
            return copy.deepcopy(getattr(self, name))
        except Exception as error:
            raise TypeError(
                f"{type(self).__name__}: the attribute {name!r} cannot be copied ({error}): leave it out of the state, "
                "or pass an object with state_dict() and load_state_dict()."
            ) from error

    def _set_attributes(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            setattr(self, name, value)


class TorchState(ObjectState):
    """The state of a training with PyTorch.

    Of models, optimizers and all that has ``state_dict()`` and ``load_state_dict()`` (samplers, schedulers,
    ``unidist.shard_loader``) the state_dict is kept, and the objects stay what they are.

    Args:
        model: a plain one.
        optimizer: its optimizer; one of ``hvd.DistributedOptimizer``, too.
        kwargs: more of them, and Python objects, as attributes of the state.

    Raises:
        ValueError: a model is wrapped by ``unidist.wrap_model`` or ``DistributedDataParallel``.
    """

    def __init__(self, model: Any = None, optimizer: Any = None, **kwargs: Any) -> None:
        everything = {"model": model, "optimizer": optimizer, **kwargs}
        #: The names of those that are kept by their state_dict.
        self._stateful = [name for name, value in everything.items() if _is_stateful(value)]
        for name in self._stateful:
            _refuse_wrapped(name, everything[name])
            setattr(self, name, everything[name])
        super().__init__(**{name: value for name, value in everything.items() if name not in self._stateful})
        self._saved_states = self._state_dicts()

    def save(self) -> None:
        """Copy all of it. Under ``torchrun --max-restarts`` also to the memory of the host."""
        super().save()
        self._saved_states = self._state_dicts()
        host_memory.write(self._commits, (self._saved, self._saved_states))

    def restore(self) -> None:
        """Return to the last commit. Gradients are dropped, of whose step a part may be done."""
        super().restore()
        for name in self._stateful:
            value = getattr(self, name)
            value.load_state_dict(copy.deepcopy(self._saved_states[name]))
            if isinstance(value, (torch.nn.Module, torch.optim.Optimizer)):
                value.zero_grad(set_to_none=True)

    def sync(self) -> None:
        """Give every rank the state of the one with the latest commit, which is a commit then. Collective.

        Optimizers take no step. After a restart by torchrun the latest commit is that in the memory of a host.
        """
        found = host_memory.read() if self._commits == 0 else None
        if found is not None:
            self._commits, (self._saved, self._saved_states) = found
            self.restore()
        self._sync_from(self._latest())
        self._saved_states = self._state_dicts()

    def _sync_from(self, src: int) -> None:
        others = {}
        for name in self._stateful:
            value = getattr(self, name)
            if isinstance(value, torch.nn.Module):
                broadcast_model_state(value, src)
            elif isinstance(value, torch.optim.Optimizer):
                broadcast_optimizer_state(value, src)
            else:
                others[name] = value.state_dict()
        for name, state in broadcast_object(others, src).items():
            getattr(self, name).load_state_dict(state)
        super()._sync_from(src)

    def _state_dicts(self) -> dict[str, Any]:
        return {name: copy.deepcopy(getattr(self, name).state_dict()) for name in self._stateful}


def _is_stateful(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def _refuse_wrapped(name: str, value: Any) -> None:
    if is_wrapped(value):
        raise ValueError(
            f"TorchState({name}=): this model is wrapped, and its process group ends with the world. Pass the plain "
            "model, and call unidist.wrap_model in the function that unidist.elastic.run calls: so it is wrapped anew "
            "each time that the workers have changed."
        )
