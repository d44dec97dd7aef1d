"""ENGINE: exceptions as text, cut to the person's frames.

Those are of cells, and of files that belong neither to this package nor to an installed library.
"""

from __future__ import annotations

import sysconfig
import textwrap
import traceback
from pathlib import Path
from types import TracebackType

from fsdp_magic.engine.cell_sources import PREFIX

_PACKAGE = str(Path(__file__).resolve().parents[1])
_LIBRARIES = tuple(
    sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")
)
_MEMBERS = 10


def message_of(error: BaseException) -> str:
    """Return the text of an exception."""
    try:
        return str(error)
    except Exception as broken:  # the person's own __str__ raised
        return f"(its text cannot be shown: {type(broken).__name__})"


def members_of(error: BaseException) -> list[str]:
    """Return the exceptions of a group, each with its frames; none if it is no group."""
    if not isinstance(error, BaseExceptionGroup):
        return []
    count = len(error.exceptions)
    told = []
    for number, member in enumerate(error.exceptions[:_MEMBERS], start=1):
        text = f"{persons_traceback(member)}{_last_line(member)}"
        below = "\n".join(members_of(member))
        told.append(f"exception {number} of {count}:\n{text}")
        if below:
            told[-1] += "\n" + textwrap.indent(below, "  ")
    return told


def persons_traceback(error: BaseException, seen: frozenset[int] = frozenset()) -> str:
    """Return the person's frames of an exception, after those of what led to it."""
    text = _persons_frames(error.__traceback__)
    cause, context = error.__cause__, error.__context__
    seen |= {id(error)}
    if id(cause) in seen or id(context) in seen:  # ``raise error from error``
        return text
    if cause is not None:
        between = "The above exception was the direct cause of the following exception:"
        return f"{persons_traceback(cause, seen)}{_last_line(cause)}\n\n{between}\n\n{text}"
    if context is None or error.__suppress_context__:
        return text
    earlier = persons_traceback(context, seen)
    if not earlier:  # a library's own business
        return text
    between = "During handling of the above exception, another exception occurred:"
    return f"{earlier}{_last_line(context)}\n\n{between}\n\n{text}"


def _last_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {message_of(error)}"


def _persons_frames(trace: TracebackType | None) -> str:
    """Return the frames of cells and of the person's own files, as text."""
    frames = [frame for frame in traceback.extract_tb(trace) if is_persons(frame.filename)]
    return "".join(traceback.StackSummary.from_list(frames).format())


def is_persons(filename: str) -> bool:
    """Return whether a file is of a cell, or one of the person's own."""
    if filename.startswith("<"):
        return filename.startswith(PREFIX)
    path = str(Path(filename).resolve())
    return not path.startswith((_PACKAGE, *_LIBRARIES))
