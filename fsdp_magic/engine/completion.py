"""ENGINE: what Tab offers in a cell: asked of the engine's own IPython.

IPython looks attributes up without running the person's code (no call, no property of theirs),
and so do we; what a ``__dir__`` of theirs does ends at the deadline. No tensor is read.
"""

from __future__ import annotations

import builtins
import keyword
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from fsdp_magic.core.protocol import Completions
from fsdp_magic.engine.interrupts import INTERRUPTS

_MOST = 300
"""No front end shows more."""
_SLOW_MATCHERS = (
    "IPCompleter.file_matcher",  # the notebook's own offers files, imports and magics
    "IPCompleter.magic_matcher",
    "IPCompleter.magic_color_matcher",
    "IPCompleter.magic_config_matcher",
    "IPCompleter.custom_completer_matcher",
)


def completions(shell: Any, line: str, *, names: Mapping[str, Any], seconds: float) -> Completions:
    """Return what may stand at the end of a line.

    Args:
        shell: the engine's IPython.
        line: what was typed, up to the cursor.
        names: what cells find beside the person's variables.
        seconds: how long it may take.
    """
    with _only_names(shell, names) as completer, _deadline(seconds):
        fragment, found = completer.complete(line_buffer=line, cursor_pos=len(line))
    own = [text for text in found if not _is_everywhere(text, shell, names)]
    return Completions(fragment=fragment, texts=tuple(own[:_MOST]))


def _is_everywhere(text: str, shell: Any, names: Mapping[str, Any]) -> bool:
    """Return whether a word is Python's or IPython's own, which the notebook offers anyway."""
    if text in names:
        return False
    return (
        keyword.iskeyword(text)
        or text in shell.user_ns_hidden
        or (hasattr(builtins, text) and text not in shell.user_ns)
    )


@contextmanager
def _only_names(shell: Any, names: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the completer, which inside knows our names, and asks neither jedi nor the disk."""
    completer = shell.Completer
    wanted = {
        "namespace": {**shell.user_ns, **names},
        "use_jedi": False,
        "disable_matchers": list(_SLOW_MATCHERS),
    }
    before = {name: getattr(completer, name) for name in wanted if hasattr(completer, name)}
    try:
        for name in before:
            setattr(completer, name, wanted[name])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of old attributes that are only looked at
            yield completer
    finally:
        for name, value in before.items():
            setattr(completer, name, value)


@contextmanager
def _deadline(seconds: float) -> Iterator[None]:
    """Stop what runs inside after a time, and again as often: IPython goes on after an error."""
    over = threading.Event()

    def press() -> None:
        while not over.wait(seconds):
            INTERRUPTS.release()

    with INTERRUPTS.allowed():
        threading.Thread(target=press, name="fsdp_magic completion", daemon=True).start()
        try:
            yield
        finally:
            INTERRUPTS.close()
            over.set()
