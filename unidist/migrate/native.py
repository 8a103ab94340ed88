"""One module, migrated: the rules in their order, and what they leave."""

from __future__ import annotations

from typing import Literal

import libcst as cst

from unidist.migrate.calls import change_allreduce, change_barriers, change_collectives, change_places
from unidist.migrate.code import Code
from unidist.migrate.imports import change_imports
from unidist.migrate.loaders import change_loaders
from unidist.migrate.names import find, is_horovod
from unidist.migrate.optimizers import change_optimizers
from unidist.migrate.report import Finding
from unidist.migrate.site import Site

Level = Literal["native", "hvd"]
#: Why a name stays the drop-in's, and what to do: by its beginning, longest first.
LEFT = {
    "allreduce_async": ("unidist has no asynchronous calls", "wrap_model averages gradients while backward runs; else wait at once: all_reduce"),
    "allreduce": ("whether it holds floating-point numbers cannot be seen, and unidist refuses the mean of whole numbers", "unidist.all_reduce(tensor, 'mean'), or allreduce_metric for a figure"),
    "grouped_": ("unidist has no grouped calls", "one unidist call for each tensor"),
    "synchronize": ("unidist has no asynchronous calls", "see the call that began the operation"),
    "poll": ("unidist has no asynchronous calls", "see the call that began the operation"),
    "join": ("ranks may come here with work still under way on others", "unidist.barrier() if all ranks come here together, else `with unidist.join(model):`"),
    **{name: ("it belongs to an optimizer that stays Horovod's", "see there") for name in ("DistributedOptimizer", "broadcast_parameters", "broadcast_optimizer_state")},
    "Compression": ("it goes to a call that stays", "wrap_model(compression='fp16')"),
    "SyncBatchNorm": ("its layers are made one by one", "plain BatchNorm, and wrap_model(sync_bn=True)"),
    "elastic": ("elastic training is not in the drop-in yet", "keep Horovod for this file"),
    "ProcessSet": ("process sets are objects of their own", "unidist.new_group(ranks), and group="),
    "add_process_set": ("process sets are objects of their own", "unidist.new_group(ranks), and group="),
    "broadcast_": ("what it changes in place cannot be seen", "tensor.copy_(unidist.broadcast(tensor))"),
    "": ("unidist has no call of this meaning", "keep it, or find another way"),
}  # fmt: skip
_ESCAPES = "the module goes where it cannot be followed: there, and in the variables that hold it, it is the drop-in"


def migrate(text: str, level: Level) -> tuple[str, list[Finding]]:
    """The module's new text, and what a person must look at.

    Raises:
        libcst.ParserSyntaxError: it does not parse.
    """
    code = Code(text)
    names = find(code)
    if any(symbol.startswith("elastic") for symbol in names.symbols.values()):
        return text, [_left(code, node, symbol) for node, symbol in names.symbols.items() if symbol.startswith("elastic")]
    site = Site(code, names, through_holders=level == "native" and not names.escapes)
    if level == "native" and not _is_hidden(site):
        _apply_rules(site)
        if site.through_holders and any(site.is_through_holder(use) for use in site.left()):
            # One variable cannot hold both modules.
            site = Site(code, names, through_holders=False)
            _apply_rules(site)
        for node in names.escapes:
            site.note(node, _ESCAPES, "import unidist where it is used", code.text(node))
        for use in site.left():
            if any(isinstance(above, cst.Call) and above.func in site.names.symbols for above in code.parents(use) if above is not code.parent(use)):
                continue  # a part of a call that is told of
            finding = _left(code, use, names.symbols[use])
            if finding.line not in {each.line for each in site.edits.findings}:
                site.edits.findings.append(finding)
    change_imports(site)
    findings = sorted(site.edits.findings, key=lambda finding: finding.line)
    return site.edits.apply(), findings


def _apply_rules(site: Site) -> None:
    change_optimizers(site)
    change_barriers(site)
    change_loaders(site)
    change_collectives(site)
    change_allreduce(site)
    change_places(site)


def _is_hidden(site: Site) -> bool:
    """Whether names come in by ``from horovod.torch import *``, so that they cannot be told from others."""
    for node in site.code.all(cst.ImportFrom):
        star = isinstance(node.names, cst.ImportStar) and node.module is not None
        if star and is_horovod(site.text(node.module or node)):
            site.note(node, "names imported by * cannot be told from others", "import the names that are used, then migrate again")
            return True
    return False


def _left(code: Code, use: cst.BaseExpression, symbol: str) -> Finding:
    why, remedy = next(said for start, said in LEFT.items() if symbol.startswith(start))
    statement = code.statement(use)
    shown = code.text(statement or use).splitlines()[0]
    return Finding(code.line(use), shown, why, remedy)

