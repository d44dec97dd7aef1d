"""ENGINE: what a person wrote of a module's class, and its source."""

from __future__ import annotations

import ast
import inspect
import sysconfig
import textwrap
from types import CodeType, FunctionType

from torch import nn

Function = ast.FunctionDef | ast.Lambda
_LIBRARIES = tuple(
    sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")
)


def own_functions(kind: type) -> dict[str, FunctionType]:
    """Return the functions of a class that a person wrote, not a library."""
    return {
        name: value
        for each in reversed(kind.__mro__)
        for name, value in vars(each).items()
        if isinstance(value, FunctionType) and not is_library_code(value)
    }


def is_library_code(function: FunctionType) -> bool:
    """Return whether a function comes with Python or an installed library."""
    code: CodeType = getattr(inspect.unwrap(function), "__code__", function.__code__)
    return code.co_filename.startswith(_LIBRARIES)


def has_library_forward(kind: type) -> bool:
    """Return whether the forward of a class comes from a library."""
    forward = getattr(kind, "forward", None)
    return (
        isinstance(forward, FunctionType)
        and is_library_code(forward)
        and forward is not nn.Module.forward
    )


def parsed(function: FunctionType) -> Function | None:
    """Return a function's syntax tree; None if its source is not there."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return None
    return next((n for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.Lambda))), None)
