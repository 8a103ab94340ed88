"""The Python frames of this package on the stack, as ``docs/architecture.md`` lists them."""

import re
import traceback
from itertools import takewhile

from tests.support.worlds import ROOT


def frames() -> list[str]:
    """From the test's call to the caller's caller, as ``path function``."""
    stack = reversed(traceback.extract_stack()[:-2])
    inside = [*takewhile(lambda frame: frame.filename.startswith(f"{ROOT}/unidist/"), stack)][::-1]
    return [f"{frame.filename.removeprefix(f'{ROOT}/')} {frame.name}" for frame in inside]


def documented(heading: str) -> list[str]:
    """The frames of a section of the architecture page, without the backend's own."""
    section = (ROOT / "docs/architecture.md").read_text().split(f"### {heading}\n")[1].split("\n#")[0]
    listed = [f"{path} {name}" for path, name in re.findall(r"^\d+\. `([\w./]+)` `(\w+)`", section, re.MULTILINE)]
    return [frame for frame in listed if not frame.startswith("backends/")]
