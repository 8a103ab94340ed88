"""What ``tests/programs/place.py`` printed, and should print."""

import json
from typing import Any


def places(output: str) -> list[dict[str, Any]]:
    """Every rank's place."""
    text = output[output.index("[{", output.index("PLACES")) :]
    # Another rank's output may follow in the same line.
    found: list[dict[str, Any]] = json.JSONDecoder().raw_decode(text)[0]
    return found


def expected(launcher: str, backend: str, size: int, nodes: int = 1) -> list[dict[str, Any]]:
    """The places of a world that has its ranks node by node."""
    local = size // nodes
    return [
        {
            "rank": rank,
            "world_size": size,
            "local_rank": rank % local,
            "local_size": local,
            "node_rank": rank // local,
            "num_nodes": nodes,
            "backend_name": backend,
            "launcher": launcher,
            "sum": sum(range(size)),
        }
        for rank in range(size)
    ]
