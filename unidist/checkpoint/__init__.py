"""Checkpoints that can be resumed on any backend and world size."""

from unidist.checkpoint.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint

__all__ = ["latest_checkpoint", "load_checkpoint", "save_checkpoint"]
