"""ENGINE: processes that a cell forks: they end where the cell ends, as a script's do.

One that ran on would be a second engine: it would answer the kernel, vote, and release peers.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

from fsdp_magic.engine.tracebacks import message_of, persons_traceback


@contextmanager
def children_end() -> Iterator[None]:
    """End a child here that was forked by the code inside."""
    engine = os.getpid()
    try:
        yield
    except BaseException as error:
        if os.getpid() != engine:
            _leave(error)
        raise
    if os.getpid() != engine:
        _leave(None)


def _leave(error: BaseException | None) -> NoReturn:
    """End this process as Python ends one, without the exit functions of the engine."""
    code = 0
    try:
        code, text = _last_words(error)
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):  # whatever the person has put in its place
                stream.flush()
        os.write(2, text.encode(errors="backslashreplace"))
    finally:
        os._exit(code)


def _last_words(error: BaseException | None) -> tuple[int, str]:
    """Return the exit code, and what goes to standard error."""
    match error:
        case None | SystemExit(code=None):
            return 0, ""
        case SystemExit(code=int() as code):
            return code & 0xFF, ""
        case SystemExit(code=text):
            return 1, f"{text}\n"
        case SyntaxError():
            return 1, "".join(traceback.format_exception_only(error))
    name = type(error).__name__
    return 1, f"in a forked child:\n{persons_traceback(error)}{name}: {message_of(error)}\n"
