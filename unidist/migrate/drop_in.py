"""The drop-in's names and the parameters of its calls, from its source: importing it would import torch."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import libcst as cst

import unidist
from unidist.horovod_names import drop_in_name

_DIRECTORY = Path(unidist.__file__).parent.parent


@cache
def drop_in_name_of(name: str) -> str | None:
    """Return the drop-in's name for one of Horovod's; None if it has none."""
    if name in ("horovod.run", "horovod.runner.run"):
        return "unidist.hvd.run"
    if name == "horovod.runner":
        return "unidist.hvd"
    target = drop_in_name(name)
    return target if target is not None and definition(target) is not None else None


def bound_arguments(symbol: str, call: cst.Call) -> dict[str, cst.BaseExpression] | None:
    """Return the arguments of a call of Horovod's, by parameter; None if they are not known, as with ``*args``."""
    given = _parameters(symbol)
    if given is None or any(arg.star for arg in call.args):
        return None
    names = [each.arg for each in given.args]
    positional = [arg.value for arg in call.args if arg.keyword is None]
    keywords = {arg.keyword.value: arg.value for arg in call.args if arg.keyword is not None}
    found = {**dict(zip(names, positional)), **keywords}
    unknown = set(keywords) - {*names, *(each.arg for each in given.kwonlyargs)}
    missing = set(names[: len(names) - len(given.defaults)]) - set(found)
    fits = len(positional) <= len(names) and len(found) == len(positional) + len(keywords)
    return found if fits and not missing and not (unknown and given.kwarg is None) else None


@cache
def _parameters(symbol: str) -> ast.arguments | None:
    """Return the parameters of one of Horovod's functions or classes; None if it is neither."""
    found = definition(f"unidist.hvd.{symbol}") if "." not in symbol else None
    if isinstance(found, ast.Module):  # a module with a function of the same name, as in Horovod
        found = definition(f"unidist.hvd.{symbol}.{symbol}")
    if isinstance(found, ast.FunctionDef):
        return found.args
    body = found.body if isinstance(found, ast.ClassDef) else []
    made = next((each.args for each in body if isinstance(each, ast.FunctionDef) and each.name == "__init__"), None)
    return made and ast.arguments(**{**dict(ast.iter_fields(made)), "args": made.args[1:]})


@cache
def definition(name: str) -> ast.AST | None:
    """Return the module, or the statement that defines what a dotted name means; None if there is none."""
    if (module := _module(name)) is not None:
        return module
    above, _, last = name.rpartition(".")
    owner = definition(above) if above else None
    if not isinstance(owner, (ast.Module, ast.ClassDef)):
        return None
    return next((found for each in _statements(owner) if (found := _defined(each, last)) is not None), None)


@cache
def _module(name: str) -> ast.Module | None:
    path = _DIRECTORY / name.replace(".", "/")
    file = next((each for each in (path.with_suffix(".py"), path / "__init__.py") if each.is_file()), None)
    return None if file is None else ast.parse(file.read_text())


def _statements(owner: ast.Module | ast.ClassDef) -> Iterator[ast.stmt]:
    for each in owner.body:
        yield each
        yield from each.body if isinstance(each, (ast.If, ast.Try)) else ()


def _defined(statement: ast.stmt, name: str) -> ast.AST | None:
    """Return what a statement defines by a name."""
    match statement:
        case ast.FunctionDef(name=own) | ast.ClassDef(name=own) | ast.AnnAssign(target=ast.Name(own)):
            return statement if own == name else None
        case ast.Assign(targets=targets):
            names = {each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)}
            return statement if name in names else None
        case ast.ImportFrom(module=str(module), names=[ast.alias("*")]):
            return definition(f"{module}.{name}")
        case ast.ImportFrom(module=str(module), names=aliases):
            found = (each.name for each in aliases if (each.asname or each.name) == name)
            return next((definition(f"{module}.{each}") or statement for each in found), None)
        case ast.Import(names=aliases):
            return statement if name in {each.asname or each.name.split(".")[0] for each in aliases} else None
    return None
