"""Remarks on what has another effect without Horovod's launcher and is not a call of Horovod's. Changes nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator

import libcst as cst

from unidist.migrate.context import Context, is_constant
from unidist.migrate.flow import assignments
from unidist.migrate.names import IMPORTERS
from unidist.migrate.rules.calls import PLAIN_CALLS
from unidist.migrate.syntax import full_name

_RANK_VARIABLES = re.compile(
    r"(OMPI_COMM_WORLD_|MV2_COMM_WORLD_)\w*(RANK|SIZE)|PMI_(RANK|SIZE)|PMIX_RANK|MPI_LOCALRANKID|HOROVOD_(LOCAL_|CROSS_)?(RANK|SIZE)"
)
_RANKS = {"rank", "local_rank", "cross_rank"}
_LONG = re.compile(
    r"download|preprocess|prepare|extract|tokeni[sz]e|evaluat|validat|untar|unzip|check_call|os\.system|subprocess\.run"
)
_LAUNCHER_VARIABLE = (
    "MPI launchers or Horovod set this variable, torchrun does not",
    "unidist.rank(), world_size(), local_rank(), ...; or stay with this launcher",
)
_LATE = (
    "it is set after init(), which has already queried the GPUs, so it has no effect",
    "set it before init(), or replace it by torch.cuda.set_device(unidist.local_rank())",
)
_ALONE = (
    "meanwhile the other ranks wait in the next collective call: in Horovod forever, now for 30 minutes at most",
    "unidist.init(timeout=seconds) if this may take longer",
)
_LIGHTNING_ARGUMENT = (
    "with this argument, Lightning imports Horovod",
    'strategy="ddp" under torchrun, or keep Horovod',
)
_COMPUTED_NAME = (
    "a module of Horovod's is imported by a computed name",
    "import each module that it can be by its literal name, then migrate again",
)
#: Arguments of Lightning's Trainer that name Horovod.
_TRAINER = {"accelerator", "strategy", "distributed_backend"}


def report_surroundings(context: Context) -> None:
    """Launchers' environment variables, a late CUDA_VISIBLE_DEVICES, long work of one rank, Lightning's Horovod."""
    for text in context.tree.all(cst.SimpleString):
        value = str(text.evaluated_value)
        if _RANK_VARIABLES.fullmatch(value) and _is_read_variable(context, text):
            context.remark(text, *_LAUNCHER_VARIABLE)
        if value == "CUDA_VISIBLE_DEVICES" and _is_assigned_variable(context, text) and _is_after_init(context, text):
            context.remark(text, *_LATE)
        if value == "horovod" and _is_for_lightning(context, text):
            context.remark(text, *_LIGHTNING_ARGUMENT)
    for call in context.tree.all(cst.Call):
        if (
            full_name(call.func).split(".")[-1] in IMPORTERS
            and call.args
            and _is_computed_horovod_name(call.args[0].value)
        ):
            context.remark(call, *_COMPUTED_NAME)
    for guard in _long_work(context):
        context.remark(guard, *_ALONE, what=f"if {context.text(guard.test)}:")
        return


def _is_read_variable(context: Context, text: cst.SimpleString) -> bool:
    """``os.environ["X"]``, ``os.environ.get("X")``, ``os.getenv("X")``, ``"X" in os.environ``, unless it is set."""
    parent = context.tree.parent(text)
    above = context.tree.parent(parent)
    if isinstance(above, cst.SubscriptElement):
        whole = context.tree.parent(above)
        return not isinstance(context.tree.parent(whole), cst.AssignTarget)
    if isinstance(above, cst.Call):
        return re.search(r"environ\.get$|getenv$|environ\.pop$", context.text(above.func)) is not None
    return isinstance(parent, cst.Comparison)


def _is_assigned_variable(context: Context, text: cst.SimpleString) -> bool:
    above = context.tree.parent(context.tree.parent(text))
    if isinstance(above, cst.SubscriptElement):
        return isinstance(context.tree.parent(context.tree.parent(above)), cst.AssignTarget)
    return isinstance(above, cst.Call) and re.search(r"setdefault$|putenv$", context.text(above.func)) is not None


def _is_after_init(context: Context, text: cst.SimpleString) -> bool:
    """Whether a statement follows ``init()``: it uses a rank, or the same function calls ``init()`` above it."""
    tree = context.tree
    statement = tree.statement(text) or text
    for use, symbol in context.names.symbols.items():
        if symbol in _RANKS and tree.is_inside(use, statement):
            return True
        if symbol == "init" and tree.function(use) is tree.function(text) and tree.position(use) < tree.position(text):
            return True
    ranks = {
        tree.variable(target)
        for value, target in assignments(tree)
        if isinstance(value, cst.Call) and context.symbol(value.func) in _RANKS
    } - {None}
    return any(tree.variable(name) in ranks for name in tree.all(cst.Name, inside=statement))


def _is_for_lightning(context: Context, text: cst.SimpleString) -> bool:
    parent = context.tree.parent(text)
    if isinstance(parent, cst.Arg) and parent.keyword is not None:
        return parent.keyword.value in _TRAINER
    key = parent.key if isinstance(parent, cst.DictElement) and parent.value is text else None
    return isinstance(key, cst.SimpleString) and key.evaluated_value in _TRAINER


def _is_computed_horovod_name(node: cst.BaseExpression) -> bool:
    """``f"horovod.{kind}"``, ``"horovod." + kind``."""
    if isinstance(node, cst.BinaryOperation):
        return isinstance(node.left, cst.SimpleString) and str(node.left.evaluated_value).startswith("horovod")
    first = node.parts[0] if isinstance(node, cst.FormattedString) and node.parts else None
    return isinstance(first, cst.FormattedStringText) and first.value.startswith("horovod")


def _long_work(context: Context) -> Iterator[cst.If]:
    """Work of rank 0 alone that may take long, right before a call of unidist in which the other ranks wait."""
    tree = context.tree
    for guard in tree.all(cst.If):
        block = tree.block(guard)
        if block is None or guard.orelse is not None or not _is_for_one_rank(context, guard.test):
            continue
        if not any(_LONG.search(full_name(call.func)) for call in tree.all(cst.Call, inside=guard.body)):
            continue
        index = next(index for index, each in enumerate(block.body) if each is guard)
        following = block.body[index + 1 : index + 2]
        for use, symbol in context.names.symbols.items():
            waits = symbol not in PLAIN_CALLS or symbol == "barrier"
            if waits and context.is_handled(use) and any(tree.is_inside(use, each) for each in following):
                yield guard
                break


def _is_for_one_rank(context: Context, test: cst.BaseExpression) -> bool:
    """``hvd.rank() == 0``, ``not hvd.rank()``, and the same with a variable for the rank."""
    tree = context.tree
    compared: cst.CSTNode | None = None
    if isinstance(test, cst.UnaryOperation) and isinstance(test.operator, cst.Not):
        compared = test.expression
    elif isinstance(test, cst.Comparison) and len(test.comparisons) == 1:
        first = test.comparisons[0]
        if isinstance(first.operator, cst.Equal) and is_constant(first.comparator, 0):
            compared = test.left
    if isinstance(compared, cst.Call):
        return context.symbol(compared.func) in _RANKS
    variable = tree.variable(compared) if compared is not None else None
    return variable is not None and any(
        isinstance(value, cst.Call) and context.symbol(value.func) in _RANKS
        for value, target in assignments(tree)
        if tree.variable(target) == variable
    )
