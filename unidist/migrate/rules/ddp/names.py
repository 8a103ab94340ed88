"""The names of torch.distributed, DistributedDataParallel, DataParallel and apex in a module."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Literal

import libcst as cst

from unidist.migrate.context import Arguments, Context, Elsewhere, Options, is_constant
from unidist.migrate.file_report import Remark
from unidist.migrate.flow import callers, is_parameter, passed_to, targets_of, values_of
from unidist.migrate.names import Names, in_import
from unidist.migrate.syntax import Statement, SyntaxTree, full_name

Place = Literal["rank", "world_size", "local_rank"]
_VARIABLES: dict[str, Place] = {"RANK": "rank", "WORLD_SIZE": "world_size", "LOCAL_RANK": "local_rank"}
_CALLS: dict[str, Place] = {"get_rank": "rank", "get_world_size": "world_size"}
_READS = re.compile(r"(?:os\.)?(?:environ|environ\.get|getenv|environ\.pop)")
#: Why a call stays: what several rules say, and what to do.
GROUP = ("it is a call within a process group of its own", "unidist.new_group(ranks), and group=")
ASYNC = (
    "it is asynchronous, and unidist has no asynchronous calls",
    "remove async_op= and wait(), then migrate again",
)
DDP = "DistributedDataParallel"
APEX_DDP = "apex.parallel.DistributedDataParallel"
#: Names outside of torch.distributed, and what they are called here.
_OTHERS = {
    "torch.nn.parallel.DistributedDataParallel": DDP,
    "torch.nn.parallel.distributed.DistributedDataParallel": DDP,
    "torch.nn.DataParallel": "DataParallel",
    "torch.nn.parallel.DataParallel": "DataParallel",
    "torch.nn.parallel.data_parallel.DataParallel": "DataParallel",
    "torch.nn.SyncBatchNorm.convert_sync_batchnorm": "convert_sync_batchnorm",
    "torch.nn.modules.batchnorm.SyncBatchNorm.convert_sync_batchnorm": "convert_sync_batchnorm",
    "torch.utils.data.distributed.DistributedSampler": "DistributedSampler",
    "torch.utils.data.DistributedSampler": "DistributedSampler",
}
#: Calls that need no process group.
HARMLESS = {"is_nccl_available", "is_gloo_available", "is_mpi_available", "is_torchelastic_launched"}
#: The parameters of the calls, in their order.
_PARAMETERS = {
    "init_process_group": "backend init_method timeout world_size rank store group_name pg_options device_id",
    "destroy_process_group": "group",
    "is_initialized": "",
    "is_available": "",
    "get_rank": "group",
    "get_world_size": "group",
    "get_backend": "group",
    "barrier": "group async_op device_ids",
    "all_reduce": "tensor op group async_op",
    "reduce": "tensor dst op group async_op group_dst",
    "broadcast": "tensor src group async_op group_src",
    "all_gather": "tensor_list tensor group async_op",
    "all_gather_object": "object_list obj group",
    "broadcast_object_list": "object_list src group device group_src",
    DDP: "module device_ids output_device dim broadcast_buffers init_sync process_group bucket_cap_mb "
    "find_unused_parameters check_reduction gradient_as_bucket_view static_graph",
    "DataParallel": "module device_ids output_device dim",
    "convert_sync_batchnorm": "module process_group",
    "apex.parallel.convert_syncbn_model": "module process_group channel_last",
    APEX_DDP: "module message_size delay_allreduce shared_param allreduce_trigger_params retain_allreduce_buffers "
    "allreduce_always_fp32 num_allreduce_streams allreduce_communicators gradient_average gradient_predivide_factor "
    "gradient_average_split_factor prof",
    "DistributedSampler": "dataset num_replicas rank shuffle seed drop_last",
}


def symbol_of(name: str) -> str | None:
    """Return a name's symbol: ``get_rank`` for ``torch.distributed.get_rank``; None for those of other libraries."""
    if name in _OTHERS:
        return _OTHERS[name]
    for prefix in ("torch.distributed.distributed_c10d.", "torch.distributed."):
        if name.startswith(prefix):
            return name[len(prefix) :]
    return name if name.startswith("apex.") else "" if name in ("torch.distributed", "apex") else None


def find_symbols(tree: SyntaxTree) -> Names:
    """Return all uses of the names, the longest of each; the module itself is the symbol ``""``."""
    names = Names()
    for node in tree.all((cst.Name, cst.Attribute)):
        if in_import(tree, node) or (isinstance(above := tree.parent(node), cst.Attribute) and _symbol(tree, above)):
            continue
        if isinstance(node, cst.Name) and tree.is_attribute_name(node):
            continue
        found = _symbol(tree, node)
        if found is not None and not (isinstance(above, cst.Attribute) and found == ""):
            names.symbols[node] = found
    return names


def _symbol(tree: SyntaxTree, node: cst.CSTNode) -> str | None:
    if not isinstance(node, (cst.Name, cst.Attribute)):
        return None
    found = (symbol_of(name) for name in tree.imported(node))
    return next((each for each in sorted(found, key=str) if each is not None), None)


class TorchContext(Context):
    """A module of torch.distributed's, DataParallel's or apex's under migration."""

    def __init__(self, tree: SyntaxTree, exported: Collection[str], elsewhere: Elsewhere, options: Options) -> None:
        super().__init__(tree, find_symbols(tree), exported, True, elsewhere=elsewhere, options=options)
        #: What starts the world, once it has been decided: statements before which ``unidist.init()`` is called, and
        #: those that call a function which does so.
        self.starts: list[cst.CSTNode] = []
        self.calls_of_start: list[cst.CSTNode] = []
        #: Whether RANK, WORLD_SIZE and LOCAL_RANK are this process's: under mp.spawn they may be the node's.
        self.by_launcher = True
        #: For each start whether unidist chooses the backend, and with it sets the process's GPU.
        self.sets_device: list[bool] = []
        #: Whether a start may choose another GPU than the script has.
        self.chooses_device = False
        #: What else keeps the file as it is.
        self.refusals: list[Remark] = []
        #: The models that are wrapped, as variables.
        self.wrapped: set[str] = set()

    def arguments(self, call: cst.Call) -> Arguments | None:
        """Return the arguments of a call by parameter; None if they cannot be determined, as with ``*args``."""
        names = _PARAMETERS.get(self.symbol(call.func) or "", "").split()
        if any(arg.star for arg in call.args) or sum(arg.keyword is None for arg in call.args) > len(names):
            return None
        return {
            arg.keyword.value if arg.keyword is not None else names[index]: arg.value
            for index, arg in enumerate(call.args)
        }

    def keep(self, use: cst.BaseExpression, why: str, remedy: str) -> None:
        """Leave a use as it is; the file stays, for this reason."""
        self.kept[use] = why, remedy

    def refuse(self, node: cst.CSTNode, why: str, remedy: str) -> None:
        """Leave the file as it is, because of a node that is no use of a name."""
        self.refusals.append(Remark(self.tree.line(node), self.first_line(node), why, remedy))

    def cut(self, statement: Statement) -> None:
        """Remove a statement; its nodes are not in the new text."""
        self.edits.remove(statement)
        self.drop(statement)

    def is_gone(self, node: cst.CSTNode) -> bool:
        """Return whether a node is not in the new text."""
        return any(self.tree.is_inside(node, each) for each in self.gone)

    def is_world(self, group: cst.BaseExpression | None) -> bool:
        """Return whether a ``group`` argument is that of all ranks."""
        return is_constant(group, None) or self.symbol(group) in ("group.WORLD", "GroupMember.WORLD")

    def can_import(self, node: cst.CSTNode) -> bool:
        """Return whether ``import unidist`` can serve a node: it is at the top of the module."""
        return True

    def is_whole_world(self, size: cst.BaseExpression | None, rank: cst.BaseExpression | None) -> bool:
        """Return whether arguments of a sampler are the number of processes and the rank, which are its defaults."""
        return (is_constant(size, None) or place_of(self, size) == "world_size") and (
            is_constant(rank, None) or place_of(self, rank) == "rank"
        )

    def is_after_start(self, node: cst.CSTNode, depth: int = 4) -> bool:
        """Return whether the world has visibly been started whenever a node is executed."""
        tree = self.tree
        function = tree.function(node)
        for start in (*self.starts, *self.calls_of_start):
            block = tree.block(start)
            later = tree.position(start) <= tree.position(node)
            if start in self.calls_of_start and tree.is_inside(node, start):
                continue
            if block is not None and function is tree.function(start) and later and tree.is_inside(node, block):
                return True
        calls = callers(tree, function) if isinstance(function, cst.FunctionDef) and depth else []
        return bool(calls) and all(self.is_after_start(call, depth - 1) for call in calls)


def environment_place(node: cst.CSTNode | None) -> Place | None:
    """Return a place in the environment: ``rank`` of ``int(os.environ["RANK"])`` and the like."""
    match node:
        case cst.Call(
            cst.Name("int"),
            [
                cst.Arg(
                    cst.Subscript(read, [cst.SubscriptElement(cst.Index(cst.SimpleString() as key))])
                    | cst.Call(read, [cst.Arg(cst.SimpleString() as key), *_])
                )
            ],
        ) if _READS.fullmatch(full_name(read)):
            return _VARIABLES.get(str(key.evaluated_value))
    return None


def place_of(context: TorchContext, node: cst.CSTNode | None, depth: int = 6) -> Place | None:
    """Return whether an expression is visibly this process's rank, its rank on its node, or the number of processes."""
    tree = context.tree
    if not isinstance(node, cst.BaseExpression) or depth == 0:
        return None
    if (found := environment_place(node)) is not None:
        return found if context.by_launcher else None
    match node:
        case cst.Call(cst.Name("int" | "float"), [cst.Arg(inner)]):
            return place_of(context, inner, depth - 1)
        case cst.Call():
            return None if context.arguments(node) else _CALLS.get(context.symbol(node.func) or "")
    variable, values = tree.variable(node), values_of(tree, node)
    if variable is None or len(targets_of(tree, variable)) != len(values):
        return None
    if variable == ".local_rank" and has_local_rank_argument(context):
        return "local_rank" if all(place_of(context, each, depth - 1) == "local_rank" for each in values) else None
    if is_parameter(tree, variable):
        if variable.split(".")[0] in context.exported:
            return None  # other files may pass something else
        values = [*values, *passed_to(tree, variable)]
    kinds = {place_of(context, each, depth - 1) for each in values}
    return kinds.pop() if len(kinds) == 1 else None


def has_local_rank_argument(context: TorchContext) -> bool:
    """Return whether the script takes ``--local_rank``, which ``torch.distributed.launch`` passes."""
    return any(
        isinstance(arg.value, cst.SimpleString) and arg.value.evaluated_value in ("--local_rank", "--local-rank")
        for call in context.tree.method_calls("add_argument")
        for arg in call.args
    )
