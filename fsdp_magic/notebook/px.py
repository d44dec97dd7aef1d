"""KERNEL: ``%px`` and its kin, ipyparallel's own magics, on our engines from their first use.

They come with ipyparallel's client, whose connection takes a third of a second that most people
do not need. So until then magics of the same names stand in for them: the first that is used
connects the client, which puts its own in their place.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from fsdp_magic.core.errors import UsageError
from fsdp_magic.notebook import sessions

_NAMES = {"line": ("px", "autopx", "pxconfig", "pxresult"), "cell": ("px",)}


def stand_in(shell: Any) -> None:
    """Register the stand-ins where there are no such magics, or only those of a closed client."""
    for kind, names in _NAMES.items():
        for name in names:
            if _is_free(shell.magics_manager.magics[kind].get(name)):
                first = partial(_first, shell, kind, name)
                shell.register_magic_function(first, magic_kind=kind, magic_name=name)


def remove(shell: Any) -> None:
    """Take the stand-ins away."""
    for kind, names in _NAMES.items():
        for name in names:
            if isinstance(shell.magics_manager.magics[kind].get(name), partial):
                del shell.magics_manager.magics[kind][name]


def _is_free(magic: Any) -> bool:
    view = getattr(getattr(magic, "__self__", None), "view", None)
    return magic is None or getattr(getattr(view, "client", None), "_closed", False)


def _first(shell: Any, kind: str, name: str, line: str, cell: str | None = None) -> Any:
    """Connect the client, and let its magic do what was asked."""
    session = sessions.current()
    if session is None:
        raise UsageError("there are no engines yet; type %fsdp_init to start some")
    session.client.activate()
    if kind == "cell":
        return shell.run_cell_magic(name, line, cell)
    return shell.run_line_magic(name, line)
