"""Imported by each process of the tests when it begins: its directory is on their PYTHONPATH."""

import gc
import os
import sys

# Cycles are collected less often: that is a quarter of the time of importing torch.
gc.set_threshold(50000, 20, 20)
if os.environ.get("UNIDIST_TESTS_PRELOADED"):
    sys.path.insert(0, os.path.dirname(os.path.dirname(__file__)))
    import preloaded

    sys.path.pop(0)
    preloaded.begin()
