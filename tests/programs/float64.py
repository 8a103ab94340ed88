"""Run a script as it stands, with float64 as PyTorch's default: ``float64.py SCRIPT.py ARGS...``.

In float32, rounding may decide on which side of a ReLU a value is, or which value is the maximum of a pool; from there
the weights are up to 1e-3 apart. Whether it does depends on the CPU and on the number of ranks. In float64 no two
values are that close.
"""

import os
import runpy
import sys

import torch

torch.set_default_dtype(torch.float64)
sys.argv = sys.argv[1:]
sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))
runpy.run_path(sys.argv[0], run_name="__main__")
