"""The module under test."""

import importlib
import os
import warnings

REAL = os.environ.get("UNIDIST_BACKEND") == "horovod"
with warnings.catch_warnings():
    if REAL:
        warnings.simplefilter("ignore")
    hvd = importlib.import_module("horovod.torch" if REAL else "unidist.hvd")
