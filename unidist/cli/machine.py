"""This machine, for the head of a report."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import torch

import unidist
from unidist.launchers.world import usable_cores


def describe() -> dict[str, str]:
    """Return the machine and the versions."""
    cpu = next((line.split(":")[1].strip() for line in _cpuinfo() if line.startswith("model name")), "unknown CPU")
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "date": datetime.now().strftime("%Y-%m-%d %H:%M"),
        "cores": f"{usable_cores()} x {cpu}",
        "gpus": ", ".join(gpus) or "none",
        "torch": torch.__version__,
        "unidist": unidist.__version__,
    }


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []
