"""Records in a file: each is a line of JSON, and the sketches as they are in memory."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unidist.compare.sketch import DIRECTIONS


def precision(tensors: Sequence[Tensor]) -> torch.dtype:
    """Return the dtype for the sketches of some tensors: as precise as they are."""
    wide = any(tensor.dtype in (torch.float64, torch.complex128) for tensor in tensors)
    return torch.float64 if wide else torch.float32


def encoded(record: dict[str, Any], sketches: Tensor | None = None) -> bytes:
    """Return a record as it is in the file."""
    if sketches is None:
        return json.dumps(record).encode() + b"\n"
    values = sketches.contiguous()
    size = values.numel() * values.element_size()
    header = {**record, "dtype": str(values.dtype).removeprefix("torch."), "bytes": size}
    return json.dumps(header).encode() + b"\n" + ctypes.string_at(values.data_ptr(), size)


def decoded(path: Path) -> Iterator[tuple[dict[str, Any], Tensor | None]]:
    """Yield the records of a file, each with its sketches."""
    with path.open("rb") as file:
        for line in iter(file.readline, b""):
            record = json.loads(line)
            if "bytes" not in record:
                yield record, None
                continue
            dtype = getattr(torch, record.pop("dtype"))
            values = bytearray(file.read(record.pop("bytes")))
            yield record, torch.frombuffer(values, dtype=dtype).reshape(-1, 1 + DIRECTIONS)
