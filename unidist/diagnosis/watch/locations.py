"""Where in the user's code a thread is."""

from __future__ import annotations

import os
import site
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import CodeType, FrameType, TracebackType

from unidist.errors import BackendError


def location_of(thread: int) -> str:
    """Return the line and function of the user's code in which a thread is, such as ``train.py:41 (step)``.

    It is the innermost one that is not of torch, unidist, Horovod, an installed package or the standard library; if
    there is none, the innermost of all.
    """
    frames = sys._current_frames()
    frame = frames.get(thread) or frames.get(threading.main_thread().ident or 0)
    return show(*users_line(frame)) if frame else ""


def here() -> str:
    """Return the same of the thread that calls."""
    return show(*users_line(sys._getframe(1)))


def users_line(frame: FrameType) -> tuple[CodeType, int]:
    """Return, for ``show``, where a frame has been called in the user's code: in less than a microsecond."""
    outer: FrameType | None = frame
    while outer is not None and not _is_users(outer.f_code.co_filename):
        outer = outer.f_back
    return (outer or frame).f_code, (outer or frame).f_lineno


def show(code: CodeType, line: int) -> str:
    """Return a line and its function."""
    function = "" if code.co_name == "<module>" else f" ({code.co_name})"
    return f"{_short(code.co_filename)}:{line}{function}"


@contextmanager
def error_location(call: str) -> Iterator[None]:
    """Let a ``BackendError`` inside tell where the user's code has made a call."""
    try:
        yield
    except BackendError as error:
        error.args = (f"{error} ({call} was called at {here()})",)
        raise


def location_in(trace: TracebackType | None) -> str:
    """Return the same of a traceback."""
    frames = [(frame.f_code, line) for frame, line in traceback.walk_tb(trace)][::-1]
    return show(*next((each for each in frames if _is_users(each[0].co_filename)), frames[0])) if frames else ""


def stacks() -> str:
    """Return the Python stacks of all threads of this process but the one that calls, the main thread's last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    found = sorted(sys._current_frames().items(), key=lambda item: item[0] == threading.main_thread().ident)
    return "".join(
        f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in found
        if ident != threading.get_ident()
    )


def _short(path: str) -> str:
    """Return a path in the working directory without it."""
    try:
        inside = os.path.relpath(path)
    except (OSError, ValueError):
        return path
    return path if inside.startswith("..") or path.startswith("<") else inside


@cache
def _is_users(path: str) -> bool:
    return not path.startswith("<frozen") and not os.path.abspath(path).startswith(find_libraries())


@cache
def find_libraries() -> tuple[str, ...]:
    """Return the directories whose code is not the user's. Found once: a process in trouble may not be able to."""
    package = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    roots = {
        package,
        os.path.realpath(os.path.join(package, "backends")),
        os.path.dirname(os.__file__),
        *site.getsitepackages(),
        site.getusersitepackages(),
    }
    files = (getattr(sys.modules.get(name), "__file__", None) for name in ("torch", "horovod"))
    roots |= {os.path.dirname(file) for file in files if file}
    return tuple(os.path.join(root, "") for root in roots if root)
