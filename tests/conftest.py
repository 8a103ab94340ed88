"""Two kinds of tests: those here start worlds; those in ``contract`` run inside one, on every rank."""

import os

import pytest

from tests.worlds import IN_WORLD, shown

# What runs inside a world is collected only there.
collect_ignore = [] if IN_WORLD in os.environ else ["contract"]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for title, lines in shown.items():
        terminalreporter.section(title)
        for line in lines:
            terminalreporter.write_line(line)
