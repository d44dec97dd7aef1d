"""ENGINE: what a NAME on a magic's line stands for: a Python expression on the engines."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

from fsdp_magic.core.errors import FsdpError


def evaluate(expression: str, namespace: Mapping[str, Any], *, flag: str) -> Any:
    """Return what a name on a magic's line stands for on the engines.

    Raises:
        FsdpError: if it stands for nothing.
    """
    try:
        return eval(expression, dict(namespace))
    except (NameError, AttributeError, LookupError, SyntaxError) as error:
        raise FsdpError(
            f"{flag} {expression} is not there on the engines ({error}); bind it in a %%fsdp cell"
        ) from None


def split_at_commas(text: str, *, flag: str) -> list[str]:
    """Return the expressions between top-level commas: of ``nets["a,b"],zip(c,d)`` two.

    Raises:
        FsdpError: if it is not Python.
    """
    source = f"_({text}\n)"
    try:
        call = ast.parse(source, mode="eval").body
    except SyntaxError as error:
        raise FsdpError(
            f"{flag} {text} is no Python expression ({error.msg}); give a name, or several with "
            "commas between them"
        ) from None
    assert isinstance(call, ast.Call)
    if call.keywords or not call.args:
        raise FsdpError(f"{flag} {text} names no data; give a name, or several with commas")
    return [ast.get_source_segment(source, argument) or text for argument in call.args]
