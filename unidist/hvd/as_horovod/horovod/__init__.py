"""``horovod`` where the directory of this package is on PYTHONPATH (``names.directory()``): it becomes the drop-in."""

import sys
from importlib import import_module

from unidist.hvd import alias

del sys.modules[__name__]  # the import system takes what is there at the end, which is the alias
alias.install()
import_module("horovod")
