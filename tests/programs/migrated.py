"""tests/legacy/plain.py on unidist, with a fault where one is named: ``migrated.py FILE [FAULT]``."""

import atexit
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

import unidist

fault = [*sys.argv, ""][2]
# Its functions, without its training: that is behind hvd.init().
source = (Path(__file__).parents[1] / "legacy" / "plain.py").read_text().split("hvd.init()")[0]
legacy: dict = {}
exec(source.replace("import horovod.torch as hvd", ""), legacy)
if fault == "crash":
    atexit.register(print, "more output\n" * 1000)
    raise RuntimeError("this script fails")

unidist.init()
model = legacy["make_model"]()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * unidist.world_size(), momentum=0.9)
wrapped = model if fault == "never averages" else unidist.wrap_model(model)
for step, (x, y) in enumerate(legacy["batches"](unidist.rank(), unidist.world_size()), 1):
    optimizer.zero_grad()
    F.cross_entropy(wrapped(x), y).backward()
    if step == 4 and fault == "nudge":
        with torch.no_grad():
            model[2].bias[1] += 0.01
    optimizer.step()
if unidist.is_main():
    torch.save(model.state_dict(), sys.argv[1])
unidist.shutdown()
