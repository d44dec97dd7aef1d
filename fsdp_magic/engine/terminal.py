"""ENGINE: what code expects of a terminal: an engine has none, and says what to do instead."""

from __future__ import annotations

import builtins
import getpass
import pdb
import sys
from typing import Any, NoReturn

from fsdp_magic.core.errors import FsdpError


def replace(shell: Any) -> None:
    """Make pages print, and refuse questions, debuggers and the end of the engine.

    Args:
        shell: the engine's IPython.
    """
    shell.set_hook("show_in_pager", _print_page, 0)  # ``name?`` in a cell
    shell.ask_exit = _refuse_exit
    builtins.input = _refuse_input
    sys.breakpointhook = _refuse_breakpoint
    getpass.getpass = _refuse_password
    # every debugger, IPython's too, comes by one of these
    pdb.Pdb.set_trace = _refuse_debugger  # type: ignore[method-assign]
    pdb.Pdb.interaction = _refuse_debugger  # type: ignore[method-assign]
    for name in ("debug", "pdb"):
        shell.register_magic_function(_refuse_debugger, magic_kind="line_cell", magic_name=name)


def _print_page(shell: Any, data: Any, start: int = 0, screen_lines: int = 0) -> None:
    text = data.get("text/plain", "") if isinstance(data, dict) else data
    sys.stdout.write(f"{text}\n")


def _refuse_input(prompt: object = "") -> NoReturn:
    raise FsdpError(
        "input() cannot be answered on an engine; ask in the notebook and send the answer: "
        "answer = input(), then %fsdp_push answer"
    )


def _refuse_breakpoint(*args: Any, **kwargs: Any) -> NoReturn:
    raise FsdpError(
        "breakpoint() has no terminal on an engine; print what you want to see, or bind it to a "
        "name and type %fsdp_pull NAME"
    )


def _refuse_password(*args: Any, **kwargs: Any) -> NoReturn:
    raise FsdpError(
        "getpass() cannot be answered on an engine; ask in the notebook and send the answer: "
        "answer = getpass.getpass(), then %fsdp_push answer"
    )


def _refuse_debugger(*args: Any, **kwargs: Any) -> NoReturn:
    raise FsdpError(
        "a debugger has no terminal on an engine; print what you want to see, or bind it to a "
        "name and type %fsdp_pull NAME"
    )


def _refuse_exit() -> NoReturn:
    raise FsdpError("exit() would end an engine; to end all of them, type %fsdp_shutdown")
