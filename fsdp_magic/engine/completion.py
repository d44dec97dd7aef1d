"""ENGINE: what Tab offers in a cell: asked of the engine's own IPython.

IPython looks attributes up without running the person's code (no call, no property of theirs),
and so do we; what a ``__dir__`` of theirs does ends at the deadline. No tensor is read.
"""

from __future__ import annotations

import builtins
import keyword
import re
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from fsdp_magic.core.completion import Completions
from fsdp_magic.engine.interrupts import INTERRUPTS

_CHAIN = re.compile(r"([^\W\d]\w*)((?:\.[^\W\d]\w*|\[\d+\])+)\.\w*$")
_STEP = re.compile(r"\.(\w+)|\[(\d+)\]")
_ALIAS = "fsdp_magic_completed"
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
    namespace = {**shell.user_ns, **names}
    known = _through_modules(line, namespace)
    asked = line if known is None else f"{line[: known.start]}{_ALIAS}{line[known.end :]}"
    if known is not None:
        namespace[_ALIAS] = known.value
    with _only_names(shell, namespace) as completer, _deadline(seconds):
        fragment, found = completer.complete(line_buffer=asked, cursor_pos=len(asked))
    private = fragment.rpartition(".")[2].startswith("_")
    own = [text for text in found if private or not text.rpartition(".")[2].startswith("_")]
    if known is not None:  # IPython 8 completes the whole expression, 9 what follows its dot
        begun = line[known.start : known.end]
        own = [text.replace(_ALIAS, begun) for text in own]
        fragment = fragment.replace(_ALIAS, begun)
    shown = [text for text in own if not _is_everywhere(text, shell, names)]
    return Completions(fragment=fragment, texts=tuple(shown[:_MOST]))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    """A value, and where the expression that leads to it stands in a line."""

    value: Any
    start: int
    end: int


def _through_modules(line: str, namespace: Mapping[str, Any]) -> _Known | None:
    """Return what stands before the last dot, if a way through modules leads there.

    torch keeps the parts of a module behind ``__getattr__``, which IPython does not run. They
    are read from where they lie.
    """
    match = _CHAIN.search(line)
    if match is None or match[1] not in namespace:
        return None
    value = namespace[match[1]]
    for name, index in _STEP.findall(match[2]):
        if not isinstance(value, torch.nn.Module):
            return None
        parts = {**value._modules, **value._parameters, **value._buffers}
        wanted = name or index
        if wanted not in parts:
            return None
        value = parts[wanted]
    return _Known(value=value, start=match.start(), end=match.end(2))


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
def _only_names(shell: Any, namespace: dict[str, Any]) -> Iterator[Any]:
    """Yield the completer, which inside knows a namespace, and asks neither jedi nor the disk."""
    completer = shell.Completer
    wanted = {
        "namespace": namespace,
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
