"""What a script does beside Horovod's calls that has another effect now: reported, and left as it is."""

from __future__ import annotations

import re
from collections.abc import Iterator

import libcst as cst

from unidist.migrate.calls import PLACE
from unidist.migrate.code import full_name
from unidist.migrate.flow import assignments
from unidist.migrate.names import IMPORTERS
from unidist.migrate.site import Site, is_constant

_VARIABLES = re.compile(
    r"(OMPI_COMM_WORLD_|MV2_COMM_WORLD_)\w*(RANK|SIZE)|PMI_(RANK|SIZE)|PMIX_RANK|MPI_LOCALRANKID|HOROVOD_(LOCAL_|CROSS_)?(RANK|SIZE)"
)
_RANKS = {"rank", "local_rank", "cross_rank"}
_LONG = re.compile(
    r"download|preprocess|prepare|extract|tokeni[sz]e|evaluat|validat|untar|unzip|check_call|os\.system|subprocess\.run"
)
_LAUNCHER = (
    "the launcher sets this variable, torchrun does not",
    "unidist.rank(), world_size(), local_rank(), ...; or go on with this launcher",
)
_LATE = (
    "it is set after init(), which asks for the GPUs already: it has no effect then",
    "set it before init(), or leave it out: torch.cuda.set_device(unidist.local_rank())",
)
_ALONE = (
    "the other ranks wait at the next collective call: without end in Horovod, for 30 minutes (torch's timeout) now",
    "unidist.init(timeout=seconds) if this may take longer",
)
_LIGHTNING = ("Lightning imports Horovod itself for it", 'strategy="ddp" under torchrun, or keep Horovod for it')
_COMPOSED = (
    "a module of Horovod's is imported by a name that is put together",
    "import what it may be by its name, then migrate again",
)
#: Arguments of Lightning's Trainer that name Horovod.
_TRAINER = {"accelerator", "strategy", "distributed_backend"}


def report_surroundings(site: Site) -> None:
    """Report environment variables, GPUs that are hidden too late, long work of one rank, and Lightning's Horovod."""
    for text in site.code.all(cst.SimpleString):
        value = str(text.evaluated_value)
        if _VARIABLES.fullmatch(value) and _is_read(site, text):
            site.note(text, *_LAUNCHER)
        if value == "CUDA_VISIBLE_DEVICES" and _is_set(site, text) and _is_after_init(site, text):
            site.note(text, *_LATE)
        if value == "horovod" and _is_for_lightning(site, text):
            site.note(text, *_LIGHTNING)
    for call in site.code.all(cst.Call):
        if full_name(call.func).split(".")[-1] in IMPORTERS and call.args and _begins_with_horovod(call.args[0].value):
            site.note(call, *_COMPOSED)
    for guard in _long_work(site):
        site.note(guard, *_ALONE, what=f"if {site.text(guard.test)}:")
        return


def _is_read(site: Site, text: cst.SimpleString) -> bool:
    """``os.environ["X"]``, ``os.environ.get("X")``, ``os.getenv("X")``, ``"X" in os.environ``, and not where it is set."""
    parent = site.code.parent(text)
    above = site.code.parent(parent)
    if isinstance(above, cst.SubscriptElement):
        whole = site.code.parent(above)
        return not isinstance(site.code.parent(whole), cst.AssignTarget)
    if isinstance(above, cst.Call):
        return re.search(r"environ\.get$|getenv$|environ\.pop$", site.text(above.func)) is not None
    return isinstance(parent, cst.Comparison)


def _is_set(site: Site, text: cst.SimpleString) -> bool:
    above = site.code.parent(site.code.parent(text))
    if isinstance(above, cst.SubscriptElement):
        return isinstance(site.code.parent(site.code.parent(above)), cst.AssignTarget)
    return isinstance(above, cst.Call) and re.search(r"setdefault$|putenv$", site.text(above.func)) is not None


def _is_after_init(site: Site, text: cst.SimpleString) -> bool:
    """Whether Horovod has been initialised before a place: it uses a rank, or the same function calls ``init()`` above it."""
    code = site.code
    statement = code.statement(text) or text
    for use, symbol in site.names.symbols.items():
        if symbol in _RANKS and code.is_inside(use, statement):
            return True
        if symbol == "init" and code.function(use) is code.function(text) and code.place(use) < code.place(text):
            return True
    ranks = {
        code.variable(target) for value, target in assignments(code)
        if isinstance(value, cst.Call) and site.symbol(value.func) in _RANKS
    } - {None}  # fmt: skip
    return any(code.variable(name) in ranks for name in code.all(cst.Name, inside=statement))


def _is_for_lightning(site: Site, text: cst.SimpleString) -> bool:
    parent = site.code.parent(text)
    if isinstance(parent, cst.Arg) and parent.keyword is not None:
        return parent.keyword.value in _TRAINER
    key = parent.key if isinstance(parent, cst.DictElement) and parent.value is text else None
    return isinstance(key, cst.SimpleString) and key.evaluated_value in _TRAINER


def _begins_with_horovod(node: cst.BaseExpression) -> bool:
    """``f"horovod.{kind}"``, ``"horovod." + kind``."""
    if isinstance(node, cst.BinaryOperation):
        return isinstance(node.left, cst.SimpleString) and str(node.left.evaluated_value).startswith("horovod")
    first = node.parts[0] if isinstance(node, cst.FormattedString) and node.parts else None
    return isinstance(first, cst.FormattedStringText) and first.value.startswith("horovod")


def _long_work(site: Site) -> Iterator[cst.If]:
    """Work that rank 0 does alone, and that may be long, right before a call of unidist at which the others wait."""
    code = site.code
    for guard in code.all(cst.If):
        block = code.block(guard)
        if block is None or guard.orelse is not None or not _is_for_one_rank(site, guard.test):
            continue
        if not any(_LONG.search(full_name(call.func)) for call in code.all(cst.Call, inside=guard.body)):
            continue
        place = next(index for index, each in enumerate(block.body) if each is guard)
        following = block.body[place + 1 : place + 2]
        for use, symbol in site.names.symbols.items():
            waits = symbol not in PLACE or symbol == "barrier"
            if waits and site.is_settled(use) and any(code.is_inside(use, each) for each in following):
                yield guard
                break


def _is_for_one_rank(site: Site, test: cst.BaseExpression) -> bool:
    """``hvd.rank() == 0``, ``not hvd.rank()``, and the same with a variable."""
    code = site.code
    asked: cst.CSTNode | None = None
    if isinstance(test, cst.UnaryOperation) and isinstance(test.operator, cst.Not):
        asked = test.expression
    elif isinstance(test, cst.Comparison) and len(test.comparisons) == 1:
        first = test.comparisons[0]
        if isinstance(first.operator, cst.Equal) and is_constant(first.comparator, 0):
            asked = test.left
    if isinstance(asked, cst.Call):
        return site.symbol(asked.func) in _RANKS
    variable = code.variable(asked) if asked is not None else None
    return variable is not None and any(
        isinstance(value, cst.Call) and site.symbol(value.func) in _RANKS
        for value, target in assignments(code) if code.variable(target) == variable
    )  # fmt: skip
