"""``sparkdl`` where the directory of this package is on PYTHONPATH: Databricks' own if that is installed."""

import sys
from importlib import import_module

from unidist.hvd import alias

del sys.modules[__name__]  # the import system takes what is there at the end
alias.install()
import_module("sparkdl")
