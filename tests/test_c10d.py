"""PyTorch's own test class for process groups, on gloo and on the mpi backend, in the same run."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection
from pathlib import Path

from tests.support.worlds import run_world, shown

#: The backend's library, and the names under which the class is run: it chooses by name what applies. A test counts
#: under the first name under which it is not skipped. What it has for mpi alone needs three ranks.
LABELS = {"gloo": ("gloo", "mpi"), "mpi4py": ("mpi4py", "gloo", "mpi")}
#: Tests that fail here and not on gloo: a name, a colon, the reason.
DIFFERENCES = Path(__file__).with_name("c10d_differences.txt")


def outcomes(library: str, size: int, directory: Path, chosen: Collection[str] = ()) -> dict[str, str]:
    """Each test's, or some tests': passed, skipped or failed, with the reason."""
    found: dict[str, str] = {}
    for label in LABELS[library] if size > 2 else LABELS[library][:-1]:
        work = directory / f"{library}-{label}"
        work.mkdir()
        file = work / "outcomes.jsonl"
        wanted = [name for name, outcome in found.items() if outcome.startswith("skipped")] or chosen
        reported: dict[str, str] = {}
        for _ in range(20):  # where a world dies, or ends after a test that breaks it, another continues
            argv = ["-m", "mpi4py", "-m", "tests.support.c10d", library, label, str(work), *wanted]
            result = run_world("openmpi", size, argv, timeout=400)
            if file.exists():
                reported = {
                    line["name"]: verdict(line["outcomes"]) for line in map(json.loads, file.read_text().splitlines())
                }
            if result.returncode == 0:
                break
            died = re.findall(r"C10D (\w+)", result.output)[-1]
            if died not in reported:
                with file.open("a") as lines:
                    line = {"name": died, "outcomes": [f"failed: the world died: {result.output[-3000:]}"]}
                    lines.write(json.dumps(line) + "\n")
        else:
            raise AssertionError(f"{library} as {label} at {size} ranks did not get through: {result.output[-3000:]}")
        found |= reported
    return found


def verdict(ranks: list[str]) -> str:
    """The worst of the ranks' outcomes."""
    return next(
        (text for text in ranks if text.startswith("failed")), next((t for t in ranks if t == "passed"), ranks[0])
    )


def allowed() -> dict[str, str]:
    lines = [line for line in DIFFERENCES.read_text().splitlines() if line.strip() and not line.startswith("#")]
    return dict(line.split(": ", 1) for line in lines)


def test_no_failure_that_gloo_does_not_have(tmp_path: Path) -> None:
    size = 3  # two ranks show no more, and what needs three is skipped
    ours = outcomes("mpi4py", size, tmp_path)
    # Only what does not pass here has to be known of gloo.
    theirs = outcomes("gloo", size, tmp_path, [name for name, outcome in ours.items() if outcome != "passed"])
    title = "torch.testing._internal.distributed.distributed_test"
    for library, found in (("mpi4py", ours), ("gloo", theirs)):
        counts = Counter(outcome.split(":")[0] for outcome in found.values())
        summary = ", ".join(f"{counts[kind]} {kind}" for kind in ("passed", "failed", "skipped"))
        shown.setdefault(title, []).append(f"{library:8} {size} ranks: {summary} of {len(found)}")
    reasons = allowed()
    worse = {
        name: outcome
        for name, outcome in ours.items()
        if outcome != "passed" and theirs[name] == "passed" and name not in reasons
    }
    assert not worse, "\n".join(f"{name}: {outcome}" for name, outcome in worse.items())
    obsolete = [name for name in reasons if ours.get(name) == "passed" or theirs.get(name) != "passed"]
    assert not obsolete, f"no difference any more: {obsolete}"
    assert sum(outcome == "passed" for outcome in ours.values()) >= 80
