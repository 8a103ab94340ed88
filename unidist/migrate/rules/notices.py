"""Remarks on what has another effect without Horovod's launcher and is not a call of Horovod's. Changes nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator

import libcst as cst

from unidist.horovod_names import is_collective
from unidist.migrate.context import Context, is_constant
from unidist.migrate.flow import values_of
from unidist.migrate.names import IMPORTERS
from unidist.migrate.syntax import called_name, full_name, imports_of

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
_RAY_TRAIN = (
    "Ray has removed HorovodTrainer, HorovodConfig and ray.tune.integration.horovod",
    "`from ray.train.torch import TorchTrainer`: TorchTrainer(train, scaling_config=...), and unidist.init() in train",
)
_INITIALIZED = (
    "it is True after unidist.init(), and was False with Horovod: what it guards now runs",
    "`False` in its place, if that is not wanted",
)
_COMPUTED_NAME = (
    "a module of Horovod's is imported by a computed name",
    "import each module that it can be by its literal name, then migrate again",
)
#: Arguments of Lightning's Trainer that name Horovod.
_TRAINER = {"accelerator", "strategy", "distributed_backend"}


def report_surroundings(context: Context) -> None:
    """Report launchers' variables, a late CUDA_VISIBLE_DEVICES, long work of one rank, Lightning's Horovod."""
    for text, value in context.tree.strings():
        if _RANK_VARIABLES.fullmatch(value) and _is_read_variable(context, text):
            context.remark(text, *_LAUNCHER_VARIABLE)
        if value == "CUDA_VISIBLE_DEVICES" and _is_assigned_variable(context, text) and _is_after_init(context, text):
            context.remark(text, *_LATE)
        if value == "horovod" and _is_for_lightning(context, text):
            context.remark(text, *_LIGHTNING_ARGUMENT)
    for call in context.tree.all(cst.Call):
        if context.native and re.search(r"\bdist(ributed)?\.is_initialized$", full_name(call.func)):
            context.remark(call, *_INITIALIZED)
        if called_name(call) in IMPORTERS and call.args and _is_computed_horovod_name(call.args[0].value):
            context.remark(call, *_COMPUTED_NAME)
    for each in imports_of(context.tree):
        if each.name.startswith(("ray.train.horovod", "ray.tune.integration.horovod")):
            context.remark(each.alias, *_RAY_TRAIN, what=each.name)
    for guard in _long_work(context):
        context.remark(guard, *_ALONE, what=f"if {context.text(guard.test)}:")
        return


def _is_read_variable(context: Context, text: cst.SimpleString) -> bool:
    """``os.environ["X"]``, ``os.environ.get("X")``, ``os.getenv("X")``, ``"X" in os.environ``, unless it is set."""
    parent, tree = context.tree.parent(text), context.tree
    match tree.parent(parent):
        case cst.SubscriptElement() as above:
            return not isinstance(tree.parent(tree.parent(above)), cst.AssignTarget)
        case cst.Call(function):
            return re.search(r"environ\.get$|getenv$|environ\.pop$", context.text(function)) is not None
    return isinstance(parent, cst.Comparison)


def _is_assigned_variable(context: Context, text: cst.SimpleString) -> bool:
    tree = context.tree
    match tree.parent(tree.parent(text)):
        case cst.SubscriptElement() as above:
            return isinstance(tree.parent(tree.parent(above)), cst.AssignTarget)
        case cst.Call(function):
            return re.search(r"setdefault$|putenv$", context.text(function)) is not None
    return False


def _is_after_init(context: Context, text: cst.SimpleString) -> bool:
    """Return whether a statement follows ``init()``: it uses a rank, or the same function calls ``init()`` above it."""
    tree = context.tree
    statement = tree.statement(text) or text
    for use, symbol in context.names.symbols.items():
        if symbol in _RANKS and tree.is_inside(use, statement):
            return True
        if symbol == "init" and tree.function(use) is tree.function(text) and tree.position(use) < tree.position(text):
            return True
    return any(_holds_rank(context, name) for name in tree.all(cst.Name, inside=statement))


def _holds_rank(context: Context, node: cst.BaseExpression) -> bool:
    """Return whether a variable is assigned a rank somewhere."""
    return any(
        isinstance(value, cst.Call) and context.symbol(value.func) in _RANKS for value in values_of(context.tree, node)
    )


def _is_for_lightning(context: Context, text: cst.SimpleString) -> bool:
    match context.tree.parent(text):
        case cst.Arg(_, cst.Name(name)):
            return name in _TRAINER
        case cst.DictElement(cst.SimpleString() as key, value) if value is text:
            return key.evaluated_value in _TRAINER
    return False


def _is_computed_horovod_name(node: cst.BaseExpression) -> bool:
    """``f"horovod.{kind}"``, ``"horovod." + kind``."""
    match node:
        case cst.BinaryOperation(cst.SimpleString() as first):
            return str(first.evaluated_value).startswith("horovod")
        case cst.FormattedString([cst.FormattedStringText(begin), *_]):
            return begin.startswith("horovod")
    return False


def _long_work(context: Context) -> Iterator[cst.If]:
    """Work of rank 0 alone that may take long, right before a call of unidist in which the other ranks wait."""
    tree = context.tree
    waiting = [
        use for use, symbol in context.names.symbols.items() if context.is_handled(use) and is_collective(symbol)
    ]
    for guard in tree.all(cst.If):
        if guard.orelse is not None or not _is_for_one_rank(context, guard.test):
            continue
        long = any(_LONG.search(full_name(call.func)) for call in tree.all(cst.Call, inside=guard.body))
        if long and any(tree.is_inside(use, each) for each in tree.siblings(guard)[1][:1] for use in waiting):
            yield guard


def _is_for_one_rank(context: Context, test: cst.BaseExpression) -> bool:
    """``hvd.rank() == 0``, ``not hvd.rank()``, and the same with a variable for the rank."""
    match test:
        case cst.UnaryOperation(cst.Not(), compared):
            pass
        case cst.Comparison(compared, [cst.ComparisonTarget(cst.Equal(), zero)]) if is_constant(zero, 0):
            pass
        case _:
            return False
    if isinstance(compared, cst.Call):
        return context.symbol(compared.func) in _RANKS
    return _holds_rank(context, compared)
