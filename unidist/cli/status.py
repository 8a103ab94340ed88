"""What a command that takes long is doing: a line that is rewritten on a terminal, a line now and then in a file."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape

#: Seconds between two lines in a file.
_INTERVAL_S = 15.0


@contextmanager
def status(text: str = "") -> Iterator[Callable[[str], None]]:
    """Show a text on stderr; the result replaces it. In a file, a text that is replaced soon is left out."""
    console = Console(stderr=True)
    if console.is_terminal:
        with console.status(escape(text)) as shown:
            yield lambda new: shown.update(escape(new))
        return
    written = time.monotonic()
    if text:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    def update(new: str) -> None:
        nonlocal written
        if new and time.monotonic() - written >= _INTERVAL_S:
            written = time.monotonic()
            console.print(new, markup=False, highlight=False, soft_wrap=True)

    yield update
