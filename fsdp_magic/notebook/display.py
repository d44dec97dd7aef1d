"""KERNEL: one display per panel: HTML and text in a notebook, text elsewhere.

In a notebook a panel is a display that is updated. A ``display_id`` update is shown while the
kernel is busy and stays in the saved file, which a widget does not. In a terminal it is a block
that is drawn again in its place. Where output goes to a file it is a line every ten seconds and
the last frame: IPython prints them, a plain script logs them to ``fsdp_magic`` at INFO, and to
stderr if it has set up no logging.
"""

from __future__ import annotations

import logging
import sys
import time
import weakref
from collections.abc import Mapping
from typing import Any

from fsdp_magic.notebook.terminal_block import TerminalBlock, is_terminal

_LOG = logging.getLogger("fsdp_magic")
_LOG_SECONDS = 10.0


class Panel:
    """One place on the page that can be drawn again."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._block: TerminalBlock | None = None
        self._logged = float("-inf")

    def draw(self, html: str, text: str, *, final: bool) -> None:
        """Show a frame, replacing the one before."""
        shell = _shell()
        if shell is not None and _draws_html(shell):
            self._update({"text/html": html, "text/plain": text})
        elif self._block is not None or is_terminal(sys.stdout):
            self._block = self._block or TerminalBlock(sys.stdout)
            self._block.draw(text, final=final)
        else:
            self._add_line(text, final=final, printed=shell is not None)

    def _update(self, bundle: dict[str, str]) -> None:
        from IPython.display import display

        if self._handle is None:
            self._handle = display(bundle, raw=True, display_id=True)  # type: ignore[no-untyped-call]
        else:
            self._handle.update(bundle, raw=True)

    def _add_line(self, text: str, *, final: bool, printed: bool) -> None:
        now = time.monotonic()
        if not final and now - self._logged < _LOG_SECONDS:
            return
        self._logged = now
        shown = text if final else text.partition("\n")[0]
        if not printed and _LOG.hasHandlers():
            _LOG.info("%s", shown)
            return
        moment = "" if final else f"{stamp()}  "  # a frame says its time, its first line does not
        print(f"{moment}{shown}", file=sys.stdout if printed else sys.stderr, flush=True)


def show(html: str, text: str) -> None:
    """Show something once."""
    Panel().draw(html, text, final=True)


_CELL_OF: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()


def mark_shown(value: object) -> None:
    """Note that the cell that runs has drawn a value."""
    shell = _shell()
    if shell is not None:
        _CELL_OF[value] = shell.execution_count


def is_shown(value: object) -> bool:
    """Return whether the cell that runs has drawn a value, so that ``Out`` need not repeat it."""
    shell = _shell()
    return shell is not None and _CELL_OF.get(value) == shell.execution_count


def write(stream: str, text: str) -> None:
    """Write what a rank printed to the stream of the same name."""
    target = sys.stdout if stream == "stdout" else sys.stderr
    target.write(text)
    target.flush()


def is_notebook() -> bool:
    """Return whether what is displayed becomes part of a page."""
    shell = _shell()
    return shell is not None and _draws_html(shell)


def show_widget(widget: Any) -> None:
    """Show a widget, in a notebook."""
    from IPython.display import display

    display(widget)  # type: ignore[no-untyped-call]


def bundle(data: Mapping[str, Any], metadata: Mapping[str, Any]) -> Any:
    """Display a MIME bundle as it is, and return the handle that can replace it."""
    from IPython.display import display

    return display(dict(data), metadata=dict(metadata), raw=True, display_id=True)  # type: ignore[no-untyped-call]


def _shell() -> Any:
    """Return the running IPython, without importing it where there is none."""
    module = sys.modules.get("IPython")
    return module.get_ipython() if module is not None else None


def _draws_html(shell: Any) -> bool:
    return hasattr(shell, "kernel")


def stamp() -> str:
    """Return the time of day, for the corner of a panel."""
    return time.strftime("%H:%M:%S")
