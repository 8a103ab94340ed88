"""The loop around a training: it runs, and runs again when the workers have changed."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from contextlib import suppress
from typing import Concatenate, ParamSpec, TypeVar

from unidist import context
from unidist.elastic import host_memory
from unidist.elastic.state import State
from unidist.errors import BackendError, CollectiveError, HostsUpdatedInterrupt, NotInitializedError, UnidistError
from unidist.launch import membership

P = ParamSpec("P")
S = TypeVar("S", bound=State)
T = TypeVar("T")
#: Generations of the same members that may fail one after the other before their first check.
_FAILURES = 3
#: Why a backend cannot go on without a process of it.
_REFUSED = {
    "mpi": "MPI ends the job when a process of it dies. Use the backend gloo or nccl under 'unidist run --min-np'.",
    "horovod": "it has elastic training of its own: hvd.elastic of horovod.torch, under 'horovodrun --min-np'. Or use "
    "the backend gloo or nccl under 'unidist run --min-np'.",
}


def run(func: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """Decorate a function that trains: it is called again each time that the workers have changed.

    Before each call every rank gets the state of the latest commit (``state.sync()``). When a worker is lost, the
    others return to their last commit; when workers come or leave, they do so at a commit. Then the state's reset
    callbacks are called, ``sync``, and the function. Collective calls, ``unidist.wrap_model`` and ``replicate`` too,
    belong inside the function: what comes before it, new workers do alone.

    Under ``torchrun --max-restarts`` an error ends this process, and the new one goes on from the last commit. Under
    other launchers the function is called once, and a failure is an error.

    Args:
        func: takes a ``State``, and any other arguments. Called by every rank, after ``unidist.init``.

    Raises:
        NotInitializedError: ``unidist.init`` has not been called.
        BackendError: the backend is mpi or Horovod.
        CollectiveError: a call failed, and nobody starts workers again, or it fails each time.
    """

    @functools.wraps(func)
    def wrapper(state: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        if not context.is_initialized():
            raise NotInitializedError("unidist.elastic.run: call unidist.init() before the function that it decorates.")
        return train(state, functools.partial(func, state, *args, **kwargs), context.rejoin)

    return wrapper


def train(state: State, func: Callable[[], T], join: Callable[[], None], lost: type[Exception] = CollectiveError) -> T:
    """Call a function until it returns.

    Args:
        state: what every rank gets before.
        func: trains.
        join: begins the next generation, after ``context.leave``.
        lost: another error than ``CollectiveError`` by which a call fails when a worker is lost.
    """
    name = context.backend_name()
    if name in _REFUSED:
        raise BackendError(f"unidist.elastic.run on the backend {name!r}: {_REFUSED[name]}")
    member = membership.current()
    if member is not None:
        member.on_loss = _abort
    failed: str | None = None  # why the last generation ended; empty: it was interrupted
    failures, members = 0, list[int]()
    while True:
        try:
            if failed is not None:
                assert member is not None
                if failed:
                    _abort()
                    context.leave()
                member.ask(failed)
                context.leave()
                join()
                if failed:
                    state.restore()
                state.on_reset()
            state.sync()
            result = func()
        except Exception as error:
            failed = _why_over(error, member, lost)
            if member is not None and failed and not member.checks:
                failures, members = (failures + 1 if member.members == members else 1), member.members
                if failures == _FAILURES:
                    raise
        else:
            host_memory.remove()
            return result
        gc.collect()  # models and process groups of this generation, whose hooks must not run in the next one


def _why_over(error: Exception, member: membership.Membership | None, lost: type[Exception]) -> str:
    """Return why the generation is over; raises the error if it has another reason."""
    if isinstance(error, HostsUpdatedInterrupt) and member is not None:
        return ""
    in_call = isinstance(error, (CollectiveError, lost))
    if member is None:
        if in_call and not host_memory.restarts():
            raise type(error)(
                f"{error} This launcher starts no process again: start the job again, from its last checkpoint "
                "(unidist.save_checkpoint), or use 'unidist run --min-np' or 'torchrun --max-restarts'."
            ) from error
        raise error
    from unidist.backends.torch_distributed import LOST_RANK

    # Errors of DDP's backward pass are RuntimeErrors of gloo.
    foreign = isinstance(error, RuntimeError) and not isinstance(error, UnidistError)
    if in_call or (foreign and LOST_RANK.search(str(error))):
        return str(error)
    if (foreign or isinstance(error, BackendError)) and (why := member.lost(membership.VERDICT_S)):
        return why
    raise error


def _abort() -> None:
    """End the calls of this rank that wait for others."""
    with suppress(NotInitializedError):
        context.current().abort()
