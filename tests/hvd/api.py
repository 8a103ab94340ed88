"""The module under test."""

import os
import warnings
from typing import Any

REAL = os.environ.get("UNIDIST_BACKEND") == "horovod"
hvd: Any
if REAL:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
else:
    pass
