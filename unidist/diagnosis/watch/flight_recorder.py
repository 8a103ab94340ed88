"""The operations of this rank in torch's flight recorder, which knows all calls of gloo and NCCL, DDP's too.

Read without stacks: torch would take more than a second for them. What is written to the buffer by gloo never has the
state "completed"; ``retired`` says that an operation is done, with or without an error.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from typing import Any

import torch

from unidist.diagnosis.operations import OperationRecord

#: Operations that are read, of the 2000 that the recorder keeps: all of them take 0.2 s.
_READ = 64
#: With this an operation begins in the recorder's JSON, whose keys are sorted.
_BEGIN = b'{"collective_seq_id"'
_DTYPES = {
    "Float": "float32", "Double": "float64", "Half": "float16", "BFloat16": "bfloat16", "Long": "int64", "Int": "int32",
    "Short": "int16", "Char": "int8", "Byte": "uint8", "Bool": "bool", "ComplexFloat": "complex64",
    "ComplexDouble": "complex128",
}  # fmt: skip


def is_available() -> bool:
    """Return whether this torch has a recorder of gloo's operations, and it is on."""
    # torch 2.7 has one of NCCL's only.
    is_on = os.environ.get("TORCH_FR_BUFFER_SIZE", os.environ.get("TORCH_NCCL_TRACE_BUFFER_SIZE", "")) != "0"
    return is_on and torch.__version__ >= "2.8" and hasattr(_c10d(), "_dump_fr_trace_json")


def operations(groups: Mapping[str, tuple[int, ...]], since_ns: int) -> list[OperationRecord]:
    """Return the last operations of some groups, the newest last.

    Args:
        groups: the global ranks of each process group, by torch's name for it; empty: all.
        since_ns: older operations belong to groups of an earlier start, of the same names.
    """
    now = time.time_ns()
    return [
        record_of(entry, groups[entry["process_group"][0]], now)
        for entry in _entries(_c10d()._dump_fr_trace_json(True, False))
        if entry["time_created_ns"] >= since_ns and entry["process_group"][0] in groups
    ]


def record_of(entry: Mapping[str, Any], ranks: tuple[int, ...], now_ns: int) -> OperationRecord:
    """Return one entry of the recorder."""
    is_message = bool(entry["is_p2p"])
    shapes, dtypes = entry["input_sizes"], entry["input_dtypes"]
    return OperationRecord(
        name=entry["profiling_name"].rpartition(":")[2].removeprefix("_"),
        number=entry["p2p_seq_id" if is_message else "collective_seq_id"],
        dtype=_DTYPES.get(dtypes[0], dtypes[0]) if dtypes else "",
        shape=tuple(shapes[0]) if shapes else None,
        ranks=ranks,
        group=entry["process_group"][0],
        seconds=(now_ns - entry["time_created_ns"]) / 1e9,
        done=entry["retired"] or entry["state"] == "completed",
        is_message=is_message,
    )


def _entries(dump: bytes) -> list[dict[str, Any]]:
    """Return the newest entries of a dump."""
    begin = len(dump)
    for _ in range(_READ):
        found = dump.rfind(_BEGIN, 0, begin)
        if found < 0:
            break
        begin = found
    if begin == len(dump):  # none, or another format
        entries: list[dict[str, Any]] = json.loads(dump).get("entries", [])
        return entries[-_READ:]
    newest: list[dict[str, Any]] = json.JSONDecoder().raw_decode("[" + dump[begin:].decode())[0]
    return newest


def _c10d() -> Any:
    return getattr(torch._C, "_distributed_c10d", None)
