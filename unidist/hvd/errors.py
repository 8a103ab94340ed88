"""The error of operations."""

from __future__ import annotations


class HorovodInternalError(RuntimeError):
    """An operation failed: ranks that do not agree, one that is gone, or the backend's own error."""
