"""What the wrapped models of all backends share: checks before a forward pass, and errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from unidist.backends.base import M, ModelOptions, WrappedModel
from unidist.errors import UnidistError


class Wrapper(WrappedModel[M]):
    """A ``WrappedModel`` with the checks of its forward pass."""

    #: Parameters that did not require grad when the model was wrapped, with their names.
    frozen: list[tuple[str, torch.Tensor]]
    #: Whether the world in which it was wrapped, of several ranks, has ended.
    ended = False

    def check_forward(self) -> None:
        """Raise if the gradients of the next backward pass would not be averaged.

        Raises:
            UnidistError: inside a ``unidist.join`` block that was not given this model, when a parameter that was
                frozen when the model was wrapped requires grad now, or when its world has ended.
        """
        if self.ended:
            raise world_ended("unidist.wrap_model")
        if self.require_backward_grad_sync:
            refuse_join(self.options)
        refuse_unfrozen(self.frozen, "model = unidist.wrap_model(unidist.unwrap(model))")

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


def _has_attribute(module: torch.nn.Module, name: str) -> bool:
    # Not by hasattr, which would run the module's properties.
    own = vars(module)
    tables = (own, own["_parameters"], own["_buffers"], own["_modules"])
    return hasattr(type(module), name) or any(name in table for table in tables)


def refuse_join(options: ModelOptions) -> None:
    """Raise inside a ``unidist.join`` block that was not given the model."""
    if options.in_join():
        raise UnidistError(
            "a data-parallel model is trained inside unidist.join, which was not given it: unidist.join(model, ...)."
        )


def refuse_unfrozen(frozen: Sequence[tuple[str, torch.Tensor]], again: str) -> None:
    """Raise if parameters that did not require grad at first do so now; ``again`` is what the user may do."""
    unfrozen = [name for name, param in frozen if param.requires_grad]
    if unfrozen:
        raise UnidistError(
            f"{len(unfrozen)} parameters, {unfrozen[0]!r} the first, were frozen when the model was made data-parallel "
            f"and require grad now: do it again, on every rank, with {again}."
        )


def world_ended(call: str) -> UnidistError:
    """The error for a model that was made data-parallel in a world that has ended."""
    return UnidistError(
        f"this model was given to {call} in a world that has ended, by unidist.shutdown() or because the workers of an "
        f"elastic run have changed: call {call} again, on the plain model, in the function that unidist.elastic.run "
        "decorates."
    )


def frozen_parameters(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """The parameters that do not require grad, with their names."""
    return [(name, param) for name, param in model.named_parameters() if not param.requires_grad]


def unused_parameters(names: Sequence[str]) -> UnidistError:
    """The error for parameters that got no gradient in a backward pass."""
    shown = ", ".join(map(repr, names[:5])) + (", ..." if len(names) > 5 else "")
    count = f"{len(names)} parameter{'s' * (len(names) > 1)}"
    return UnidistError(
        f"{count} got no gradient in a backward pass: {shown}. Pass find_unused_parameters=True to "
        "wrap_model, or set requires_grad=False on them before wrapping. If that pass failed and was caught, wrap the "
        "model again."
    )
