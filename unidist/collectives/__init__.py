"""Collective calls, and metrics over all ranks."""
