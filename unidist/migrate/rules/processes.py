"""``horovod.run``, which starts the processes of a function, becomes ``unidist.spawn`` where it starts them here."""

from __future__ import annotations

import re

import libcst as cst

from unidist.migrate.context import Arguments, Context, is_constant
from unidist.migrate.drop_in import bound_arguments

_NAMES = {"horovod.run", "horovod.runner.run"}
#: Options that say how Horovod communicates, or what it prints.
_WITHOUT_EFFECT = {"use_gloo", "use_mpi", "verbose", "disable_cache"}
_HERE = re.compile(r"(localhost|127\.0\.0\.1)(:\d+)?")


def change_run(context: Context) -> None:
    """Change each ``horovod.run(train, args=(3,), np=2)`` that starts its processes on this host."""
    for call in context.tree.all(cst.Call):
        arguments = bound_arguments("run", call) if context.tree.imported(call.func) & _NAMES else None
        if arguments is None or not _is_here(context, call, arguments):
            continue
        values = [arguments["func"], arguments.get("np", arguments.get("num_proc", cst.Integer("1")))]
        values += [arguments["args"]] if "args" in arguments else []
        new = cst.Call(context.unidist_name(call, "spawn"), [cst.Arg(value.deep_clone()) for value in values])
        context.keep_comments(call)
        context.edits.replace(call, new)
        context.gone.append(call.func)


def _is_here(context: Context, call: cst.Call, arguments: Arguments) -> bool:
    """Return whether a call starts processes of this host alone, by arguments that ``spawn`` has too.

    New processes import the script, so that it must not do this by its import.
    """
    hosts = arguments.get("hosts")
    local = isinstance(hosts, cst.SimpleString) and _HERE.fullmatch(str(hosts.evaluated_value)) is not None
    above = context.tree.parents(call)
    guarded = any(isinstance(each, cst.If) and "__name__" in context.text(each.test) for each in above)
    return (
        (local or is_constant(hosts, None))
        and not set(arguments) - {"func", "args", "np", "num_proc", "hosts", *_WITHOUT_EFFECT}
        and not any(context.tree.is_inside(use, call) for use in context.names.symbols)
        and (guarded or context.tree.function(call) is not context.tree.module)
    )
