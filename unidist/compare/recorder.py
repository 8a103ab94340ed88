"""Records the training of a rank: losses, gradients and weights of each step.

It uses hooks of torch only, so the script needs no change. A step is recorded when the outermost ``step()`` returns, as
Horovod's optimizer averages the gradients and then calls ``step()`` of its base class: torch's hooks see two, nested.
"""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from unidist.compare.encoding import encoded, precision
from unidist.compare.naming import names, parameters
from unidist.compare.sketch import norms, sketches

#: The attribute of a scaled loss with the GradScaler's factor.
FACTOR = "_unidist_factor"


class Recorder:
    """A context manager that records this process; at its end it writes the final weights."""

    def __init__(self, directory: Path, rank: int, limit: int | None = None, undo_idle: bool = False) -> None:
        """
        Args:
            directory: for ``rank-N.records`` (see ``encoding``), and rank 0's ``final.pt``.
            rank: of this process.
            limit: number of steps after which the process ends, with status 0.
            undo_idle: undo the steps that do not train.
        """
        self._file = (directory / f"rank-{rank}.records").open("wb", buffering=0)
        self._final = directory / "final.pt" if rank == 0 else None
        self._limit = limit
        self._pid = os.getpid()
        self._steps = 0
        #: The nesting depth of the ``step()`` and ``backward()`` calls in progress.
        self._in_step = 0
        self._in_backward = 0
        #: The tensors on which backward() was called since the last step of any optimizer.
        self._losses: list[Tensor] = []
        #: Number of calls of backward(): in total, and at each optimizer's last step.
        self._backwards = 0
        self._backwards_at: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        #: The parameters of the optimizers that have taken a step, and the number of each optimizer.
        self._parameters: list[list[Tensor]] = []
        self._numbers: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        self._starts: WeakKeyDictionary[Optimizer, Tensor] = WeakKeyDictionary()
        self._undo_idle = undo_idle
        #: The weights before a step that may be undone, and the state that each undone step has left.
        self._weights: list[Tensor] = []
        self._idle_states: WeakKeyDictionary[Optimizer, Tensor] = WeakKeyDictionary()
        self._undo: list[Any] = []

    def __enter__(self) -> Recorder:
        for handle in (register_optimizer_step_pre_hook(self._before), register_optimizer_step_post_hook(self._after)):
            self._undo.append(handle.remove)
        self._wrap(torch.autograd, "backward", self._backward)
        self._wrap(torch.amp.GradScaler, "scale", _scale)
        # It ends the process without Python's cleanup.
        self._wrap(os, "_exit", self._leave)
        return self

    def __exit__(self, *exc: object) -> None:
        for undo in self._undo:
            undo()
        self._undo = []
        self._finish()

    def _wrap(self, owner: Any, name: str, around: Any) -> None:
        original = getattr(owner, name)

        # Not functools.partial, which does not bind as a method.
        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return around(original, *args, **kwargs)

        setattr(owner, name, wrapper)
        self._undo.append(lambda: setattr(owner, name, original))

    def _leave(self, original: Any, status: int) -> None:
        self._finish()
        original(status)

    def _finish(self) -> None:
        if os.getpid() == self._pid and not self._file.closed:
            self._file.close()
            if self._final is not None:
                torch.save([[p.detach().cpu().clone() for p in params] for params in self._parameters], self._final)

    def _backward(self, original: Any, tensors: Any, *args: Any, **kwargs: Any) -> None:
        # Activation checkpointing calls it within another backward().
        if not self._in_backward:
            self._backwards += 1
            self._losses += [
                _loss(t) for t in ([tensors] if isinstance(tensors, Tensor) else tensors) if t.numel() == 1
            ]
        self._in_backward += 1
        try:
            original(tensors, *args, **kwargs)
        finally:
            self._in_backward -= 1

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        # Within backward(), Horovod's Adasum steps single parameters, for its own computation.
        if self._in_backward or os.getpid() != self._pid:
            return
        self._in_step += 1
        if self._in_step == 1 and self._number_of(optimizer) is None:
            self._starts[optimizer] = sketches(parameters(optimizer))
        if self._in_step == 1 and self._undo_idle:
            self._forget_idle(optimizer)

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._in_backward or os.getpid() != self._pid:
            return
        self._in_step -= 1
        if self._in_step == 0:
            self._record(optimizer)
            if self._steps == self._limit:
                sys.exit(0)

    def _record(self, optimizer: Optimizer) -> None:
        params = parameters(optimizer)
        both = sketches([*(param.grad for param in params), *params])
        if self._is_idle(optimizer, both[: len(params)]):
            self._file.write(encoded({"idle": type(optimizer).__name__}))
            if self._undo_idle:
                self._idle_states[optimizer] = _state(optimizer)
                with torch.no_grad():
                    for param, weights in zip(params, self._weights):
                        param.copy_(weights)
            return
        self._backwards_at[optimizer] = self._backwards
        number = self._number(optimizer, params)
        losses = [loss.item() for loss in self._losses]
        self._losses = []
        self._steps += 1
        self._file.write(encoded({"optimizer": number, "losses": losses}, both.to(precision(params))))

    def _forget_idle(self, optimizer: Optimizer) -> None:
        """Before a step that trains, clear the state that an undone one has left, unless other state was loaded."""
        params = parameters(optimizer)
        if self._is_idle(optimizer, sketches([param.grad for param in params])):
            self._weights = [param.detach().clone() for param in params]
            return
        left = self._idle_states.pop(optimizer, None)
        if left is not None and torch.equal(left, _state(optimizer)):
            optimizer.state.clear()

    def _is_idle(self, optimizer: Optimizer, gradients: Tensor) -> bool:
        """Return whether a step does not train: Horovod takes one with zero gradients to create the state."""
        optimizer_record = self._backwards > self._backwards_at.get(optimizer, self._backwards)
        return not optimizer_record and not norms(gradients).any()

    def _number_of(self, optimizer: Optimizer) -> int | None:
        """Return the optimizer's number; None before its first step, and if parameters were added since the last."""
        number = self._numbers.get(optimizer)
        same = number is not None and len(self._parameters[number]) == len(parameters(optimizer))
        return number if same else None

    def _number(self, optimizer: Optimizer, params: list[Tensor]) -> int:
        """As ``_number_of``, or a new one."""
        number = self._number_of(optimizer)
        if number is None:
            number = self._numbers[optimizer] = len(self._parameters)
            self._parameters.append(params)
            record = {
                "kind": type(optimizer).__name__,
                "names": names(optimizer),
                "shapes": [list(param.shape) for param in params],
                "precision": _precision(optimizer, params),
                "horovod": getattr(sys.modules.get("horovod.torch"), "__name__", None) == "horovod.torch",
            }
            self._file.write(encoded(record, self._starts.pop(optimizer).to(precision(params))))
        return number


def _precision(optimizer: Optimizer, params: list[Tensor]) -> float:
    """Return the rounding error of the coarsest dtype of the parameters and of what is sent of their gradients."""
    sent = getattr(
        getattr(optimizer, "_compression", None), "__name__", ""
    )  # of Horovod's optimizers and the drop-in's
    dtypes = {param.dtype for param in params if param.dtype.is_floating_point}
    dtypes |= {torch.float16} if sent == "FP16Compressor" else set()
    return max((torch.finfo(dtype).eps for dtype in dtypes), default=0.0)


def _state(optimizer: Optimizer) -> Tensor:
    """Sketches of an optimizer's state."""
    return sketches([each for entry in optimizer.state.values() for each in entry.values() if isinstance(each, Tensor)])


def _loss(tensor: Tensor) -> Tensor:
    # A detached copy; its value is read later, so as not to synchronize with a GPU here.
    return tensor.detach().double() / getattr(tensor, FACTOR, 1.0)


def _scale(original: Any, scaler: torch.amp.GradScaler, outputs: Any) -> Any:
    scaled = original(scaler, outputs)
    if isinstance(scaled, Tensor):
        setattr(scaled, FACTOR, scaler.get_scale())
    return scaled
