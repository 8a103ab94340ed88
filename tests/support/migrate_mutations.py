"""Mutations of the legacy scripts: other names, forms of import, orders and comments, with the same meaning."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence

Mutation = Callable[[str, random.Random], str]
#: Lines that may be swapped with the line before them, if that is one of them too and not more indented.
_MOVABLE = re.compile(r"^( *)hvd\.broadcast_(parameters|optimizer_state)\(.*\)$")
_IMPORT = re.compile(r"^(import|from) [\w.]+( import [\w, ]+| as \w+)?$")
_COMMENTS = ["# TODO: tune", "# Horovod: see the docs", "# noqa", "#", "# æøå: ünïcode"]


def alias(text: str, draw: random.Random) -> str:
    """``hvd`` has another name."""
    name = draw.choice(["h", "horo", "dist", "_hvd", "HVD"])
    return (
        re.sub(r"(?<![.\w\"'-])hvd(?=\b)(?!\s*=\s*hvd\b)", name, text)
        if "self.hvd" not in text and "hvd=hvd" not in text
        else text
    )


def form(text: str, draw: random.Random) -> str:
    """The import has another form."""
    forms = [
        "from horovod import torch as hvd",
        "import horovod.torch as hvd, sys as _sys",
        "from horovod import (\n    torch as hvd,\n)",
    ]
    return re.sub(r"^import horovod\.torch as hvd$", draw.choice(forms), text, flags=re.MULTILINE)


def full(text: str, draw: random.Random) -> str:
    """The module is not renamed by its import."""
    if not re.search(r"^import horovod\.torch as hvd$", text, re.MULTILINE) or re.search(
        r"(=|\()\s*hvd\b(?!\.)|self\.hvd", text
    ):
        return text
    text = re.sub(r"^import horovod\.torch as hvd$", "import horovod.torch", text, flags=re.MULTILINE)
    return re.sub(r"(?<![.\w])hvd\.", "horovod.torch.", text)


def variables(text: str, draw: random.Random) -> str:
    """Models and optimizers have other names."""
    for name, others in {"model": ["net", "m", "network"], "optimizer": ["opt", "optim_", "sgd"]}.items():
        if draw.random() < 0.7:
            other = draw.choice(others)
            if re.search(rf"\b{other}\b", text) is None:
                text = (
                    re.sub(rf"(?<![.\w'\"]){name}\b(?!['\"])(?!=)", other, text)
                    if f"{name}=" not in text and f".{name}" not in text
                    else text
                )
    return text


def order(text: str, draw: random.Random) -> str:
    """Broadcasts are swapped, and so are imports."""
    lines = text.split("\n")
    for index in range(1, len(lines)):
        before, line = lines[index - 1], lines[index]
        pairs = (_MOVABLE, _IMPORT)
        if (
            any(kind.match(before) and kind.match(line) for kind in pairs)
            and "__future__" not in before
            and draw.random() < 0.6
        ):
            lines[index - 1], lines[index] = line, before
    return "\n".join(lines)


def comments(text: str, draw: random.Random) -> str:
    """Comments and blank lines between statements, and comments after them."""
    lines: list[str] = []
    open_ = 0
    quoted = False
    for line in text.split("\n"):
        indent = line[: len(line) - len(line.lstrip())]
        if (
            not open_
            and not quoted
            and line.strip()
            and draw.random() < 0.25
            and not line.strip().startswith(("else", "elif", "except", "finally"))
        ):
            lines.append(draw.choice(["", indent + draw.choice(_COMMENTS)]))
        quoted ^= line.count('"""') % 2 == 1
        open_ += sum(line.count(sign) for sign in "([{") - sum(line.count(sign) for sign in ")]}")
        whole = (
            not open_
            and not quoted
            and line.strip()
            and "#" not in line
            and not line.endswith("\\")
            and '"""' not in line
        )
        lines.append(line + ("  " + draw.choice(_COMMENTS) if whole and draw.random() < 0.15 else ""))
    return "\n".join(lines)


def rank(text: str, draw: random.Random) -> str:
    """Other tests for rank 0."""
    other = draw.choice(["0 == hvd.rank()", "not hvd.rank()", "hvd.rank() < 1", "(hvd.rank() == 0)"])
    return text.replace("if hvd.rank() == 0:", f"if {other}:")


def keywords(text: str, draw: random.Random) -> str:
    """Arguments by name or by position."""
    text = text.replace("state_dict(), root_rank=0)", draw.choice(["state_dict(), 0)", "state_dict(), root_rank = 0)"]))
    return re.sub(
        r"DistributedOptimizer\(optimizer, named_parameters=([\w.]+\(\))\)",
        draw.choice(
            [
                r"DistributedOptimizer(named_parameters=\1, optimizer=optimizer)",
                r"DistributedOptimizer(optimizer, \1)",
                r"DistributedOptimizer(\n    optimizer,\n    named_parameters=\1,\n)",
                r"DistributedOptimizer(optimizer, named_parameters=list(\1))",
            ]
        ),
        text,
    )


def line_ends(text: str, draw: random.Random) -> str:
    """CRLF."""
    return text.replace("\n", "\r\n") if draw.random() < 0.3 else text


#: In this order: those that look for ``hvd`` come before those that rename it.
MUTATIONS: list[Mutation] = [rank, keywords, order, variables, form, alias, full, comments, line_ends]
#: Those that leave the names as they are that other files import.
PROJECT_MUTATIONS: list[Mutation] = [rank, keywords, order, form, comments, line_ends]


# ------------------------------------------------------------------------------------ of torch.distributed
def dist_form(text: str, draw: random.Random) -> str:
    """torch.distributed is imported in another way, or under another name."""
    if "import torch.distributed as dist\n" not in text:
        return text
    kind = draw.randrange(4)
    name = draw.choice(["dist", "tdist", "c10d"])
    if kind == 0 and "torch.distributed." not in text.replace("import torch.distributed as", ""):
        text = text.replace("import torch.distributed as dist\n", "import torch.distributed\n")
        return re.sub(r"(?<![\w.])dist\.(?=\w)", "torch.distributed.", text)
    line = [f"import torch.distributed as {name}\n", f"from torch import distributed as {name}\n"][kind % 2]
    text = text.replace("import torch.distributed as dist\n", line)
    return re.sub(r"(?<![\w.])dist\.(?=\w)", f"{name}.", text)


def ddp_name(text: str, draw: random.Random) -> str:
    """DistributedDataParallel by its whole name, or by another."""
    name = draw.choice(["torch.nn.parallel.DistributedDataParallel", "nn.parallel.DistributedDataParallel", "Parallel"])
    pattern = r"^from torch\.nn\.parallel import DistributedDataParallel(?: as (\w+))?\n"
    found = re.search(pattern, text, re.MULTILINE)
    if found is None or (name.startswith("nn.") and "import torch.nn as nn" not in text):
        return text
    own = found[1] or "DistributedDataParallel"
    line = "" if "." in name else f"from torch.nn.parallel import DistributedDataParallel as {name}\n"
    text = text.replace(found[0], line)
    return re.sub(rf"(?<![\w.]){own}(?=[(),])", name, text)


def options(text: str, draw: random.Random) -> str:
    """Arguments that say what is the default, in another order, by name or position."""
    ops = draw.choice([r"\1op=\2)", r"\1\2)", r"\1op=\2, async_op=False)"])
    text = re.sub(r"(all_reduce\([\w.]+, )op=((?:dist\.)?ReduceOp\.\w+)\)", ops, text)
    text = text.replace('process_group("gloo"', draw.choice(['process_group(backend="gloo"', 'process_group("gloo"']))
    text = text.replace("src=0)", draw.choice(["src=0)", "src = 0)"]))
    return text.replace("barrier()", draw.choice(["barrier()", "barrier(group=None)", "barrier(async_op=False)"]))


def ranks(text: str, draw: random.Random) -> str:
    """Other tests for rank 0."""
    other = draw.choice(
        ["not dist.get_rank()", "0 == dist.get_rank()", "(dist.get_rank() == 0)", "dist.get_rank() < 1"]
    )
    return text.replace("if dist.get_rank() == 0:", f"if {other}:").replace("if rank == 0:", f"if {other}:")


DDP_MUTATIONS: list[Mutation] = [ranks, options, dist_form, ddp_name, comments, line_ends]


def mutated(text: str, seed: int, kinds: Sequence[Mutation] = MUTATIONS) -> str:
    """The text after some mutations, the same for each seed."""
    draw = random.Random(seed)
    chosen = set(draw.sample(list(kinds), draw.randint(2, 6)))
    for mutation in kinds:
        if mutation in chosen:
            text = mutation(text, draw)
    return text
