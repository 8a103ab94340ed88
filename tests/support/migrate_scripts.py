"""Random scripts of Horovod's users, each run as it is, on the drop-in, and migrated.

As a program (``python -m tests.support.migrate_scripts FIRST END FILE``) it is one rank: it runs the scripts of some
seeds both ways, and rank 0 writes a line of JSON for each. A script appends its results to the list ``out``.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
import sys
import textwrap
from collections.abc import Sequence
from itertools import chain
from typing import Any

#: How the module is imported, and what it is called then; in functions for the second.
IMPORTS = [
    ("import horovod.torch as hvd", "hvd"),
    ("import horovod.torch as horo, sys as _sys", "horo"),
    ("import horovod.torch", "horovod.torch"),
    ("from horovod import torch as hvd", "hvd"),
    ("from horovod import torch as hvd, run", "hvd"),
    ("import horovod\nimport horovod.torch as hvd", "hvd"),
    ("import json; import horovod.torch as hvd", "hvd"),
    ("try:\n    import horovod.torch as hvd\nexcept ImportError:\n    hvd = None", "hvd"),
    ("USED = True\nif USED:\n    import horovod.torch as hvd", "hvd"),
    ("import horovod as h\nimport horovod.torch", "h.torch"),
    ("try:\n    import horovod\n    import horovod.torch\nexcept ImportError:\n    horovod = None", "horovod.torch"),
    ("import importlib\nhvd = importlib.import_module('horovod.torch')", "hvd"),
]
#: Aliases of the module, and the expression that refers to it.
ALIASES = [
    ("", "{hvd}"),
    (
        "class T:\n    def __init__(self):\n        self.hvd = {hvd}\n    def rank(self):\n"
        "        return self.hvd.rank()\n"
        "t = T()\nout.append(t.rank())",
        "t.hvd",
    ),
    ("class T:\n    def __init__(self, lib={hvd}):\n        self.lib = lib\nt = T()", "t.lib"),
    ("class T:\n    hvd = {hvd}\n    def rank(self):\n        return self.hvd.rank()\nout.append(T().rank())", "T.hvd"),
    ("def f(lib={hvd}):\n    return lib.size()\nout.append(f())", "{hvd}"),
    ("def g(lib):\n    return lib.local_rank()\nout.append(g({hvd}))", "{hvd}"),
    ("def get():\n    return {hvd}\nout.append(get().size())", "get()"),
    ("comm = {hvd} if out is not None else None", "comm"),
    ("comm = {hvd}", "comm"),
    ("libs = dict(a={hvd})", "libs['a']"),
]
USES = [
    "",
    "{held}.init()\nout.append({held}.rank())",
    "out.append({held}.rank())\nout.append({hvd}.size())",
    "out.append({held}.allreduce(torch.ones(2)).tolist())",
    "out.append({held}.synchronize({held}.allreduce_async(torch.ones(2))).tolist())",
    "out.append({held}.rank())\nout.append({hvd}.synchronize({hvd}.allreduce_async(torch.ones(2))).tolist())",
    "out.append({held}.Compression.fp16 is not None)\nout.append({hvd}.rank())",
    "def use():\n    return {held}.rank()\nout.append(use())",
    "out.append(getattr({held}, 'rank')())",
    "out.append({held}.broadcast_object([{hvd}.rank()], root_rank=0))",
]

MODELS = {
    "nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))": ("", "[0]"),
    "Net()": (
        "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.fc1 = nn.Linear(4, 5)\n"
        "        self.fc2 = nn.Linear(5, 3)\n    def forward(self, x):\n"
        "        return self.fc2(torch.tanh(self.fc1(x)))\n"
        "    def norm(self):\n        return sum(float(p.detach().norm()) for p in self.parameters())",
        ".fc1",
    ),
}
OPTIMIZERS = [
    "torch.optim.SGD({model}.parameters(), lr=0.1)",
    "torch.optim.SGD({model}.parameters(), lr=0.01 * {hvd}.size(), momentum=0.9)",
    "torch.optim.Adam([p for p in {model}.parameters() if p.requires_grad], lr=0.01)",
    "torch.optim.AdamW({model}.parameters(), lr=0.01, weight_decay=0.1)",
    "torch.optim.RMSprop(filter(lambda p: p.requires_grad, {model}.parameters()), lr=0.01, momentum=0.5)",
    "torch.optim.Adagrad({model}.parameters(), lr=0.02)",
    "torch.optim.SGD([dict(params=[p for p in {model}.parameters() if p.dim() == 1]), "
    "dict(params=[p for p in {model}.parameters() if p.dim() > 1], lr=0.05)], lr=0.1)",
]
NAMED = ["named_parameters={model}.named_parameters()"] * 3 + ["{model}.named_parameters()", ""]
OPTIONS = [""] * 7 + [
    "compression={hvd}.Compression.fp16",
    "compression={hvd}.Compression.none",
    "op={hvd}.Average",
    "op={hvd}.Sum",
    "gradient_predivide_factor=1.0",
    "num_groups=1",
]
PARAMETERS = [
    "{hvd}.broadcast_parameters({model}.state_dict(), root_rank=0)",
    "{hvd}.broadcast_parameters({model}.state_dict(), 0)",
    "{hvd}.broadcast_parameters(list({model}.named_parameters()), root_rank=0)",
]
WRAPPINGS = [
    "{parameters}\n{inner} = {made}\n{opt} = {wrap}",
    "{inner} = {made}\n{opt} = {wrap}\n{parameters}",
    "{inner} = {made}\n{parameters}\n{hvd}.broadcast_optimizer_state({inner}, root_rank=0)\n{opt} = {wrap}",
    "{opt} = {wrap_made}\n{parameters}",
    "{parameters}\n{opt} = {wrap_made}\n{state}",
]
#: Arguments of the wrapped optimizer, and what a batch does.
_LOSS = "loss = F.cross_entropy({model}(x), y)\n"
_CLIP = "torch.nn.utils.clip_grad_norm_({model}.parameters(), 0.5)\n"
_SKIP = "with {opt}.skip_synchronize():\n    {opt}.step()"
STEPS = [
    ("", "{opt}.zero_grad()\n" + _LOSS + "loss.backward()\n{opt}.step()"),
    ("", "{opt}.zero_grad()\nloss = F.cross_entropy({model}.forward(x), y)\nloss.backward()\n{opt}.step()"),
    (
        "",
        "{opt}.zero_grad()\nloss = F.cross_entropy({model}(x), y)\nother = F.cross_entropy({model}(2 * x), y)\n"
        "(loss + 0.5 * other).backward()\n{opt}.step()",
    ),
    (
        "",
        "def compute(net, a, b):\n    return F.cross_entropy(net(a), b)\n{opt}.zero_grad()\n"
        "loss = compute({model}, x, y)\n"
        "loss.backward()\n{opt}.step()",
    ),
    ("", _LOSS + "{model}.zero_grad()\nloss.backward()\nif True:\n    {opt}.step()"),
    ("", "{opt}.zero_grad()\n" + _LOSS + "loss.backward()\n{opt}.synchronize()\n" + _CLIP + _SKIP),
    ("", "{opt}.zero_grad()\n" + _LOSS + "loss.backward()\n" + _CLIP.replace("0.5", "100.0") + "{opt}.step()"),
    (
        "",
        "{opt}.zero_grad()\nwith torch.autocast('cpu', dtype=torch.bfloat16):\n"
        "    loss = F.cross_entropy({model}(x), y)\nloss.backward()\n{opt}.synchronize()\n"
        "torch.nn.utils.clip_grad_value_({model}.parameters(), 0.1)\n" + _SKIP,
    ),
    (
        "",
        "{opt}.zero_grad()\n" + _LOSS + "loss.backward()\n{opt}.synchronize()\nfor p in {model}.parameters():\n"
        "    if p.grad is not None:\n        p.grad.data = p.grad.data / (1 + p.grad.norm())\n" + _SKIP,
    ),
    (
        "backward_passes_per_step=2",
        "{opt}.zero_grad()\nfor j in range(0, 2):\n    loss = F.cross_entropy({model}(x[j:j + 1]), y[j:j + 1]) / 2\n"
        "    loss.backward()\n{opt}.synchronize()\n" + _CLIP + _SKIP,
    ),
    (
        "",
        "{opt}.zero_grad()\n"
        + _LOSS
        + "{self}scaler.scale(loss).backward()\n{opt}.synchronize()\n{self}scaler.unscale_({opt})\n"
        "with {opt}.skip_synchronize():\n    {self}scaler.step({opt})\n{self}scaler.update()",
    ),
    (
        "",
        "{opt}.zero_grad()\n" + _LOSS + "given = [p for p in {model}.parameters() if p.requires_grad]\n"
        "for p, g in zip(given, torch.autograd.grad(loss, given)):\n    p.grad = g.clone()\n{opt}.step()",
    ),
    (
        "",
        "{opt}.zero_grad()\nloss = F.cross_entropy({hvd}.allgather({model}(x)), {hvd}.allgather(y))\n"
        "loss.backward()\n{opt}.step()",
    ),
    (
        "",
        "{opt}.zero_grad()\n" + _LOSS + "parts = []\nparts.append(loss)\n"
        "parts.append(0.01 * sum(p.pow(2).sum() for p in {model}.parameters()))\nsum(parts).backward()\n"
        "{opt}.synchronize()\nfor p in {model}.parameters():\n    p.grad.mul_(0.5)\n" + _SKIP,
    ),
    (
        "",
        "def one(a, b):\n    {opt}.zero_grad()\n    value = F.cross_entropy({model}(a), b)\n    value.backward()\n"
        "    {opt}.step()\n"
        "    return value\nloss = one(x, y)",
    ),
    (
        "",
        "{opt}.zero_grad()\n"
        + _LOSS
        + "loss.backward()\nif len(x) > 0:\n    {opt}.synchronize()\n    "
        + _CLIP
        + textwrap.indent(_SKIP, "    ")
        + "\nelse:\n    {opt}.step()",
    ),
    (
        "backward_passes_per_step=2",
        "{opt}.zero_grad()\nfor j in range(2):\n    loss = F.cross_entropy({model}(x[j:j + 1]), y[j:j + 1])\n"
        "    (loss / 2).backward()\n{opt}.step()",
    ),
    (
        "backward_passes_per_step=2",
        _LOSS + "loss.backward()\nif (i + 1) % 2 == 0:\n    {opt}.step()\n    {opt}.zero_grad()",
    ),
]
#: What the metric is made of, and how a batch's loss is kept.
METRICS = [
    ("", "losses.append(loss.item())"),
    ("", "losses.append({hvd}.allreduce(loss.detach(), name='loss').item())"),
    (
        "def metric_average(value, name):\n    tensor = torch.tensor(value)\n"
        "    average = {hvd}.allreduce(tensor, name=name)\n"
        "    return average.item()",
        "losses.append(metric_average(loss.item(), 'loss'))",
    ),
    (
        "class Metric:\n    def __init__(self, name):\n        self.name = name\n        self.sum = torch.tensor(0.)\n"
        "    def update(self, value):\n        self.sum += {hvd}.allreduce(value.detach().cpu(), name=self.name)\n"
        "meter = Metric('m')",
        "meter.update(loss)\nlosses.append(float(meter.sum))",
    ),
]
LOADERS = [
    "sampler = DistributedSampler(data, num_replicas={hvd}.size(), rank={hvd}.rank())\n"
    "loader = DataLoader(data, batch_size=3, sampler=sampler)",
    "sampler = DistributedSampler(data, num_replicas={hvd}.size(), rank={hvd}.rank(), shuffle=False)\n"
    "loader = DataLoader(data, batch_size=3, sampler=sampler)\nout.append(len(sampler))",
    "loader = DataLoader(TensorDataset(X[{hvd}.rank()::{hvd}.size()], Y[{hvd}.rank()::{hvd}.size()]), batch_size=3)",
    "loader = [(X[i:i + 3] + {hvd}.rank(), Y[i:i + 3]) for i in range(0, 12, 3)]",
]
#: Other lines, in the loop or before it.
LINES = [
    "out.append(float({model}(X).sum()))",
    "with torch.no_grad():\n    for p in {model}.parameters():\n        p.mul_(0.99)",
    "{hvd}.broadcast_parameters({model}.state_dict(), root_rank=0)",
    "for p in {model}{part}.parameters():\n    p.requires_grad = False",
    "torch.optim.lr_scheduler.StepLR({opt}, 1, gamma=0.9).step()",
    "kept = dict(model={model}.state_dict(), opt={opt}.state_dict())\nout.append(len(kept['model']))\n"
    "{model}.load_state_dict(kept['model'])\n{opt}.load_state_dict(kept['opt'])",
    "path_of = path if {hvd}.rank() == 0 else None\nif path_of:\n"
    "    torch.save(dict(m={model}.state_dict()), path_of)\n"
    "    out.append(sorted(torch.load(path_of)['m']))",
    "out.append(isinstance({opt}, torch.optim.Optimizer))",
    "out.append({model}{part}.weight.sum().item())",
    "out.append(sorted({model}.state_dict()))",
    "for p in {model}.parameters():\n    out.append(list(p.shape))",
    "{model}.load_state_dict({model}.state_dict())",
    "out.append({opt}.param_groups[0]['lr'])",
    "for group in {opt}.param_groups:\n    group['lr'] = group['lr'] * 0.5",
    "{opt}.load_state_dict({opt}.state_dict())",
    "out.append(type({model}).__name__)",
    "import copy\nshadow = copy.deepcopy({model})\n"
    "out.append(sum(float(p.detach().sum()) for p in shadow.parameters()))",
    "out.append({hvd}.allgather(torch.tensor([float({hvd}.rank())])).tolist())",
    "out.append({hvd}.broadcast(torch.tensor(3), 0, name='resume').item())",
    "out.append({hvd}.broadcast_object(dict(a={hvd}.rank()), root_rank=0))",
    "out.append({hvd}.allreduce(torch.tensor(2.0), average=False).item())",
    "out.append({hvd}.allreduce(torch.tensor([1, 2]), op={hvd}.Sum, name='s').tolist())",
    "{hvd}.allreduce(torch.tensor(0), name='barrier')",
    "{hvd}.join()",
    "out.append(len(loader))",
    "if {hvd}.rank() == 0:\n    torch.save({model}.state_dict(), path)",
    "{model}.to(torch.device('cuda', {hvd}.local_rank()) if torch.cuda.is_available() else 'cpu')",
    "{model} = {model}.to('cpu')",
    "for p in {model}.parameters():\n    p.requires_grad_(True)",
    "hook = {model}.register_forward_hook(lambda module, given, output: None)\nhook.remove()",
    "net = {model}\nout.append(len(list(net.children())))",
    "def evaluate(net):\n    net.eval()\n    with torch.no_grad():\n        value = float(net(X).sum())\n"
    "    net.train()\n"
    "    return value\nout.append(evaluate({model}))",
    "{model}.eval()\nwith torch.no_grad():\n    right = ({model}(X).argmax(1) == Y).float().mean()\n"
    "out.append(float({hvd}.allreduce(right, name='accuracy')))\n{model}.train()",
]


def script(seed: int) -> str:
    """One script; most train, the others pass the module around."""
    draw = random.Random(seed)
    kinds = [_with_alias, _training, _several_models if seed % 3 == 0 else _training, _training]
    return kinds[seed % 4](draw)


def _with_alias(draw: random.Random) -> str:
    imported, hvd = draw.choice(IMPORTS)
    alias, held = draw.choice(ALIASES)
    held = held.format(hvd=hvd)
    return _lines("import torch", imported, alias.format(hvd=hvd), draw.choice(USES).format(hvd=hvd, held=held))


def _several_models(draw: random.Random) -> str:
    """Two models, each with its optimizer, by one loss or by one each."""
    imported, hvd = draw.choice(IMPORTS[:6])
    names, wraps = draw.choice([("encoder", "head"), ("net_a", "net_b")]), []
    for name in names:
        made = draw.choice(OPTIMIZERS[:4]).format(model=name, hvd=hvd)
        named = draw.choice(["", f", named_parameters={name}.named_parameters()"])
        wraps.append(f"opt_{name} = {made}\nopt_{name} = {hvd}.DistributedOptimizer(opt_{name}{named})")
    sent = [f"{hvd}.broadcast_parameters({name}.state_dict(), root_rank=0)" for name in names]
    setup = draw.choice([[*sent, *wraps], [*wraps, *sent], [sent[0], wraps[0], wraps[1], sent[1]]])
    first, second = names
    ends = [f"opt_{name}.step()\nopt_{name}.zero_grad()" for name in names]
    steps = draw.choice(
        [
            [f"loss = F.softplus({second}({first}(x))).mean()\nloss.backward()", *draw.sample(ends, 2)],
            [
                f"code = {first}(x)\ncode.pow(2).mean().backward()",
                ends[0],
                f"loss = F.softplus({second}(code.detach())).mean()\nloss.backward()",
                ends[1],
            ],
        ]
    )
    if draw.random() < 0.5:
        steps.append(f"out.append({hvd}.allreduce(loss.detach(), name='loss').item())")
    return _lines(
        "import torch\nimport torch.nn as nn\nimport torch.nn.functional as F",
        imported,
        f"{hvd}.init()\ntorch.manual_seed({hvd}.rank())",
        f"{first}, {second} = nn.Linear(4, 4), nn.Linear(4, 1)",
        *setup,
        f"for x in torch.randn(6, 3, 4):\n{textwrap.indent(_lines(*steps), '    ')}",
        *(f"out.append([p.tolist() for p in {name}.parameters()])" for name in names),
    )


def _training(draw: random.Random) -> str:
    imported, hvd = draw.choice(IMPORTS)
    make = draw.choice(list(MODELS))
    form = draw.choice(["flat", "main", "train", "build", "class"])
    in_class = form == "class"
    given, step = draw.choice(STEPS)
    frozen = draw.random() < 0.15 and ("p.grad" not in step or "is not None" in step)
    optimizer_made, wrapping, metric = draw.choice(OPTIMIZERS), draw.choice(WRAPPINGS), draw.choice(METRICS)
    opt = "self.opt" if in_class else draw.choice(["opt", "optimizer"])
    words = {
        "hvd": hvd,
        "model": "self.model" if in_class else "model",
        "opt": opt,
        "self": "self." if in_class else "",
    }
    words["part"] = MODELS[make][1]
    words["inner"] = opt if draw.random() < 0.9 else f"{opt}_inner"
    options = ", ".join(each for each in (draw.choice(NAMED), given, draw.choice(OPTIONS)) if each)
    words["made"] = optimizer_made.format(**words)
    # Horovod's broadcast of an empty state takes a step, which SGD does not notice.
    words["state"] = (
        "{hvd}.broadcast_optimizer_state({opt}, root_rank=0)".format(**words) if "SGD" in optimizer_made else ""
    )
    words["parameters"] = draw.choice(PARAMETERS).format(**words)
    rest = f", {options.format(**words)}" if options else ""
    words["wrap"] = f"{hvd}.DistributedOptimizer({words['inner']}{rest})"
    words["wrap_made"] = f"{hvd}.DistributedOptimizer({words['made']}{rest})"
    if "SGD" not in optimizer_made:
        wrapping = wrapping.replace("{hvd}.broadcast_optimizer_state({inner}, root_rank=0)\n", "")

    def fill(text: str) -> str:
        return text.format(**words)

    start = _lines(
        fill("{hvd}.init()\ntorch.manual_seed({hvd}.rank())"),
        "noise = torch.Generator().manual_seed(7)\nX = torch.randn(36, 4, generator=noise)",
        "Y = torch.randint(0, 3, (36,), generator=noise)\ndata = TensorDataset(X, Y)",
    )
    loader = fill(draw.choice(LOADERS))
    setup = _lines(
        fill("{model} = ") + make,
        fill("for p in {model}{part}.parameters():\n    p.requires_grad = False") if frozen else "",
        fill(wrapping),
        fill("{self}scaler = torch.amp.GradScaler('cpu', init_scale=8.0)"),
    )
    batch = _lines(fill(step), fill(metric[1]))
    epoch = [f"for i, (x, y) in enumerate(loader):\n{textwrap.indent(batch, '    ')}"]
    before = []
    for line in draw.sample(LINES, draw.choice([0, 1, 1, 2])):
        (epoch if draw.random() < 0.5 else before).append(fill(line))
    if "DistributedSampler" in loader and draw.random() < 0.8:
        epoch.insert(0, "sampler.set_epoch(epoch)")
    train = _lines(
        *before,
        "losses = []",
        f"for epoch in range(2):\n{textwrap.indent(_lines(*epoch), '    ')}",
        "out.append(losses)",
    )
    end = fill("out.append([p.tolist() for p in {model}.state_dict().values()])")
    head = _lines(
        "import torch\nimport torch.nn as nn\nimport torch.nn.functional as F",
        imported,
        "from torch.utils.data import DataLoader, TensorDataset, DistributedSampler",
        MODELS[make][0],
        fill(metric[0]),
    )
    return _lines(head, _arranged(form, start, loader, setup, train, end, f"model, {opt}, scaler"))


def _arranged(form: str, start: str, loader: str, setup: str, train: str, end: str, made: str) -> str:
    """The parts of a training script in one of its forms; ``made`` names what ``setup`` makes."""
    given = "loader, sampler" if "sampler =" in loader else "loader"
    if form == "flat":
        return _lines(start, loader, setup, train, end)
    if form == "main":
        return _lines(_function("main()", start, loader, setup, train, end), "main()")
    if form == "train":
        return _lines(
            start,
            loader,
            setup,
            _function(f"train({made}, {given})", train),
            f"train({made}, {given})",
            end,
        )
    if form == "build":
        build = _function("build()", setup, f"return {made}")
        return _lines(build, start, loader, f"{made} = build()", train, end)
    methods = _lines(
        _function("__init__(self)", setup), _function(f"train(self, {given})", train), _function("report(self)", end)
    )
    calls = f"trainer = Trainer()\ntrainer.train({given})\ntrainer.report()"
    return _lines("class Trainer:", textwrap.indent(methods, "    "), start, loader, calls)


def _lines(*parts: str) -> str:
    return "".join(f"{part.rstrip()}\n" for part in parts if part)


def _function(signature: str, *parts: str) -> str:
    return f"def {signature}:\n{textwrap.indent(_lines(*parts), '    ')}"


# ------------------------------------------------------------------------------------ one rank
def run(code: str, path: str) -> tuple[list[Any], str | None]:
    """What a script has computed, and the error that ended it."""
    out: list[Any] = []
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            exec(compile(code, "script", "exec"), {"out": out, "path": path, "__name__": "script"})
    except Exception as error:
        return out, f"{type(error).__name__}: {error}"
    return out, None


def distance(left: Any, right: Any) -> float:
    """How far numbers are apart, inside lists too; infinite for values of other kinds."""
    if repr(left) == repr(right):
        return 0.0
    if isinstance(left, list) and isinstance(right, list) and len(left) == len(right):
        return max(map(distance, left, right))
    if isinstance(left, float) and isinstance(right, float):
        return abs(left - right)
    return float("inf")


def migrated(seed: int) -> dict[str, Any]:
    """A script, migrated; whether a second migration changes nothing, and which names it leaves undefined."""
    from unidist.migrate.context import Options
    from unidist.migrate.module import migrate_module
    from unidist.migrate.self_check import undefined_names

    before, options = script(seed), Options(partial=seed % 2 == 0)
    after, remarks = migrate_module(before, "native", options=options)
    return {
        "seed": seed,
        "code": after,
        "findings": len(remarks),
        "drop_in": "unidist.hvd" in after or "unidist import hvd" in after,
        "stable": seed % 4 != 0 or migrate_module(after, "native", options=options)[0] == after,
        "undefined": sorted(undefined_names(after) - undefined_names(before)),
        # Rounded to half precision after each backward pass, and no longer after the last one; RMSprop divides by what
        # it has seen of small gradients.
        "limit": (1e-3 if "RMSprop" in before else 2e-4) if "fp16" in before or "bfloat16" in before else 2e-5,
    }


def main(first: int, end: int, file: str) -> None:
    from unidist.hvd import alias

    alias.install()
    import unidist

    unidist.init()
    rank, size, lines = unidist.rank(), unidist.world_size(), []
    parts = unidist.all_gather_object([migrated(seed) for seed in range(first + rank, end, size)])
    for row in sorted(chain(*parts), key=lambda row: row["seed"]):
        before, after = script(row["seed"]), row.pop("code")
        legacy, new = (run(code, f"{file}.{rank}.pt") for code in (before, after))
        row |= {"errors": [legacy[1], new[1]], "distance": distance(legacy[0], new[0])}
        lines.append(unidist.all_gather_object(row))
    if rank == 0:
        with open(file, "w") as report:
            report.writelines(f"{json.dumps(line)}\n" for line in lines)


if __name__ == "__main__":
    arguments: Sequence[str] = sys.argv[1:]
    main(int(arguments[0]), int(arguments[1]), arguments[2])
