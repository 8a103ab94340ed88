"""The timeline's file while it is written, and where it cannot be written."""

import json
import logging
import resource
import time
from pathlib import Path
from typing import Any

import pytest

from unidist.hvd.timeline import TensorTimeline

pytestmark = pytest.mark.unit


def loaded(text: str) -> list[dict[str, Any]]:
    """As Chrome and Perfetto read it: the closing bracket may be missing."""
    events: list[dict[str, Any]] = json.loads(text if text.rstrip().endswith("]") else text + "]")
    return events


def test_events_are_in_the_file_before_it_ends(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    timeline = TensorTimeline()
    timeline.open(path)
    timeline.begin("allreduce.a", "ALLREDUCE")
    timeline.end("allreduce.a")
    timeline.begin("allreduce.b", "NEGOTIATE_ALLREDUCE")
    end = time.monotonic() + 10
    while "NEGOTIATE" not in path.read_text():
        assert time.monotonic() < end
        time.sleep(0.01)
    assert [event["ph"] for event in loaded(path.read_text())] == ["M", "M", "B", "E", "M", "B"]
    for number in range(10_000):
        timeline.begin(f"allreduce.{number}", "ALLREDUCE")
    timeline.close()
    assert len(json.loads(path.read_text())) == 20_006 and path.read_text().rstrip().endswith("]")
    timeline.close()
    timeline.begin("late", "ALLREDUCE")
    timeline.end("late")


@pytest.mark.parametrize("path", ["/dev/full", "/nowhere/timeline.json"])
def test_a_file_that_cannot_be_written_is_logged_once(path: str, caplog: pytest.LogCaptureFixture) -> None:
    timeline = TensorTimeline()
    with caplog.at_level(logging.ERROR, "unidist"):
        timeline.open(path)
        end = time.monotonic() + 10
        while timeline.on:
            timeline.begin("allreduce.a", "ALLREDUCE")
            assert time.monotonic() < end
            time.sleep(0.001)
        timeline.end("allreduce.a")
        timeline.close()
    (record,) = caplog.records
    assert f"the timeline {path} cannot be written" in record.getMessage()


def test_a_disk_that_fills_up_leaves_whole_events(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Also where only the last write fails, in ``close``."""
    path = tmp_path / "timeline.json"
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    timeline = TensorTimeline()
    with caplog.at_level(logging.ERROR, "unidist"):
        timeline.open(path)
        timeline.begin("a", "ALLREDUCE")
        while "ALLREDUCE" not in path.read_text():
            time.sleep(0.01)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, limit[1]))
        try:
            for number in range(10_000):
                timeline.begin(f"allreduce.{number}", "ALLREDUCE")
            timeline.close()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert [event["ph"] for event in loaded(path.read_text())] == ["M", "M", "B"]
    assert len(caplog.records) == 1 and not timeline.on
