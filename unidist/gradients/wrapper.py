"""What all wrapped models share: their interface, checks before a forward pass, and errors."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import chain
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from unidist.errors import UnidistError

M = TypeVar("M", bound=nn.Module)


def _no_join() -> bool:
    return False


@dataclass(frozen=True)
class ModelOptions:
    """Options of ``wrap_model``; see there."""

    find_unused_parameters: bool = False
    broadcast_buffers: bool = True
    bucket_cap_mb: float = 25.0
    compression: torch.dtype | None = None
    static_graph: bool = False
    #: The global ranks that train the model together.
    ranks: tuple[int, ...] = ()
    #: Whether a ``unidist.join`` block is running.
    in_join: Callable[[], bool] = _no_join


class WrappedModel(nn.Module, Generic[M]):
    """What ``wrap_model`` returns: a model with the interface of ``DistributedDataParallel``, which it is on
    torch.distributed.

    Call it as the model inside, ``module``, whose other attributes and methods are reached through ``module``.
    """

    #: The model inside.
    module: M
    options: ModelOptions
    #: Whether the next forward pass that records gradients is followed by a reduction; off inside ``no_sync``.
    require_backward_grad_sync: bool

    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate gradients locally: forward passes inside are followed by no reduction."""
        raise NotImplementedError

    def rebuild_buckets(self) -> None:
        """Rebuild DDP's buckets now instead of in a later forward pass. Collective."""
        raise NotImplementedError


class TrainedParameters:
    """The parameters of a model that are trained, as they are when it is made data-parallel.

    Args:
        model: the plain one.
        accumulators: whether hooks are on the parameters' gradient accumulators, as DDP's are.
    """

    def __init__(self, model: nn.Module, *, accumulators: bool = False) -> None:
        self._accumulators = accumulators
        self._slots = [
            (part._parameters, name, param, param.dtype, param.device)
            for part in model.modules()
            for name, param in part._parameters.items()
            if param is not None and param.requires_grad
        ]
        self._parts = [
            (part._modules, name, child) for part in model.modules() for name, child in part._modules.items()
        ]
        self._params = [param for _, _, param, _, _ in self._slots]
        tables: list[dict[str, Any]] = [each for part in model.modules() for each in (part._parameters, part._modules)]
        self._tables = [table for table in tables if table]
        self._remember()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_memory": None, "_ids": None, "_nodes": None}  # a copy has its own

    def _remember(self) -> None:
        self._memory: list[int] | None = list(map(Tensor.data_ptr, self._params))
        self._ids = self._found_ids()
        self._nodes = self._found_nodes()

    def _found_ids(self) -> list[int]:
        return list(map(id, chain.from_iterable(map(dict.values, self._tables))))

    def _found_nodes(self) -> list[object]:
        params = self._params if self._accumulators else []
        with torch.enable_grad():
            return [torch.autograd.graph.get_gradient_edge(param).node for param in params if param.requires_grad]

    def converted(self) -> bool:
        """Return whether ``model.double()``, ``model.to(device)`` or the like have cut the gradients off.

        A conversion, also one there and back, gives a parameter other memory, and a new gradient accumulator without
        DDP's hooks; other memory alone does no harm.
        """
        if self._memory is None:
            self._remember()
        if list(map(Tensor.data_ptr, self._params)) == self._memory:
            return False
        if self.of_other_kind():
            return True
        nodes, found = self._nodes, self._found_nodes()
        if len(nodes) == len(found) and any(node is not now for node, now in zip(nodes, found)):
            return True
        self._remember()
        return False

    def of_other_kind(self) -> bool:
        """Return whether a parameter has another dtype or device than at first."""
        return any(param.dtype is not dtype or param.device != device for _, _, param, dtype, device in self._slots)

    def replaced(self) -> bool:
        """Return whether the model has another object in place of a parameter or of a submodule, or one more.

        Plain tensors do not count: ``torch.func.functional_call`` puts them there, and trains them itself.
        """
        return self._found_ids() != self._ids and (self._is_replaced() or self._has_more())

    def _is_replaced(self) -> bool:
        return any(
            (now := table.get(name)) is not param and (now is None or isinstance(now, nn.Parameter))
            for table, name, param, _, _ in self._slots
        ) or any(table.get(name) is not child for table, name, child in self._parts)

    def _has_more(self) -> bool:
        known = {id(each) for each in (*self._params, *(child for _, _, child in self._parts))}
        found = [each for table in self._tables for each in table.values() if id(each) not in known]
        modules = [each for each in found if isinstance(each, nn.Module)]
        params = chain(found, *(module.parameters() for module in modules))
        return any(isinstance(param, nn.Parameter) and param.requires_grad for param in params)


class Wrapper(WrappedModel[M]):
    """A ``WrappedModel`` with the checks of its forward pass."""

    trained: TrainedParameters
    #: Parameters that did not require grad when the model was wrapped, with their names.
    frozen: list[tuple[str, Tensor]]
    #: Whether the world in which it was wrapped, of several ranks, has ended.
    ended = False
    _warned = False

    def check_forward(self) -> None:
        """Raise if the gradients of the next backward pass would not be averaged.

        Raises:
            UnidistError: inside a ``unidist.join`` block that was not given this model, when a parameter that was
                frozen when the model was wrapped requires grad now, when parameters have been converted, replaced or
                since, or when its world has ended.
        """
        if self.ended:
            raise world_ended("unidist.wrap_model")
        if self.require_backward_grad_sync:
            refuse_join(self.options)
        refuse_unfrozen(self.frozen, "model = unidist.wrap_model(unidist.unwrap(model))")
        if torch.compiler.is_compiling():  # which is when a dtype is new; a raise here ends in a call without it
            changed = self.trained.of_other_kind()
        else:
            changed = self.trained.converted() or self.trained.replaced()
        if changed:
            raise replaced_parameters("wrap_model")

    def check_backward(self) -> None:
        """Warn once if a backward pass begins inside ``no_sync`` whose forward pass was outside."""
        if not self.require_backward_grad_sync and not self._warned:
            self._warned = True
            warnings.warn(
                "a backward pass inside no_sync averages gradients, as its forward pass was outside: of a wrapped "
                "model, both must be inside.",
                stacklevel=2,
            )

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            inner = self.__dict__.get("_modules", {}).get("module")
            if inner is None or not _has_attribute(inner, name):
                raise
        raise AttributeError(
            f"the wrapped model has no attribute {name!r}; the {type(inner).__name__} inside has: use "
            f"model.module.{name}. A forward pass that trains must be a call of the wrapped model, model(...), or its "
            "gradients are not averaged: for a method that makes one, such as training_step, let forward() call it."
        )


def _has_attribute(module: nn.Module, name: str) -> bool:
    # Not by hasattr, which would run the module's properties.
    own = vars(module)
    tables = (own, own["_parameters"], own["_buffers"], own["_modules"])
    return hasattr(type(module), name) or any(name in table for table in tables)


def buffers_of(module: nn.Module) -> list[Tensor]:
    """Return the buffers that follow the first rank's; BatchNorm's statistics can be written without a new version.

    No backward pass in training needs them, and a second one of the same graph would fail for a version.
    """
    norms = [layer for layer in module.modules() if isinstance(layer, _BatchNorm)]
    statistics = {id(each) for layer in norms for each in layer.buffers(recurse=False)}
    return [each.data if id(each) in statistics else each for each in module.buffers()]


def refuse_join(options: ModelOptions) -> None:
    """Raise inside a ``unidist.join`` block that was not given the model."""
    if options.in_join():
        raise UnidistError(
            "a data-parallel model is trained inside unidist.join, which was not given it: unidist.join(model, ...)."
        )


def replaced_parameters(call: str) -> UnidistError:
    """Return the error for a model that has other parameters than when it was given to ``call``."""
    return UnidistError(
        "parameters of this model were converted (.double(), .half(), .to(...)), replaced or added after "
        f"unidist.{call}, so that their gradients are not averaged: do that before unidist.{call}, or call it again "
        "now, on every rank, and make the optimizer anew where it has the old parameters."
    )


def refuse_unfrozen(frozen: Sequence[tuple[str, Tensor]], again: str) -> None:
    """Raise if parameters that did not require grad at first do so now; ``again`` is what the user may do."""
    unfrozen = [name for name, param in frozen if param.requires_grad]
    if unfrozen:
        raise UnidistError(
            f"{len(unfrozen)} parameters, {unfrozen[0]!r} the first, were frozen when the model was made data-parallel "
            f"and require grad now: do it again, on every rank, with {again}."
        )


def world_ended(call: str) -> UnidistError:
    """Return the error for a model that was made data-parallel in a world that has ended."""
    return UnidistError(
        f"this model was given to {call} in a world that has ended, by unidist.shutdown() or because the workers of an "
        f"elastic run have changed: call {call} again, on the plain model, in the function that unidist.elastic.run "
        "decorates."
    )


def frozen_parameters(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the parameters that do not require grad, with their names."""
    return [(name, param) for name, param in model.named_parameters() if not param.requires_grad]


def unused_parameters(params: Mapping[str, Tensor]) -> UnidistError:
    """Return the error for parameters that got no gradient in a backward pass, by their names."""
    if frozen := [name for name, param in params.items() if not param.requires_grad]:
        return UnidistError(
            f"{frozen[0]!r} was frozen (requires_grad=False) after unidist.wrap_model, and gets no gradient: wrap "
            "again on every rank, model = unidist.wrap_model(unidist.unwrap(model)), or with "
            "find_unused_parameters=True."
        )
    shown = ", ".join(map(repr, list(params)[:5])) + (", ..." if len(params) > 5 else "")
    count = f"{len(params)} parameter{'s' * (len(params) > 1)}"
    return UnidistError(
        f"{count} got no gradient in a backward pass: {shown}. Pass find_unused_parameters=True to "
        "wrap_model, or set requires_grad=False on them before wrapping. If that pass failed and was caught, wrap the "
        "model again."
    )
