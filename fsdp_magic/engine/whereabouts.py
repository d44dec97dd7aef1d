"""ENGINE: where a rank is: the line of the cell, and what it waits in there.

The line comes from the main thread's frames: from an exception, or from the living thread, which
the service thread may look at. What it waits in is known from what was noted on the way in: each
collective, each vote. Nothing is computed before somebody asks.
"""

from __future__ import annotations

import faulthandler
import linecache
import os
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import NamedTuple, TextIO

from fsdp_magic.core.whereabouts import STACK_SIGNAL, Whereabouts, stack_file
from fsdp_magic.engine.cell_sources import PREFIX
from fsdp_magic.engine.collectives import DivergedError
from fsdp_magic.engine.groups import is_broken_transport
from fsdp_magic.engine.parallel import torch_private
from fsdp_magic.engine.surrogates import encodable
from fsdp_magic.engine.tracebacks import is_persons
from fsdp_magic.engine.world import World

_DISTRIBUTED = f"{os.sep}torch{os.sep}distributed{os.sep}"
_LOADER = f"{os.sep}torch{os.sep}utils{os.sep}data{os.sep}"
_VOTES = {
    # our file that votes -> what its votes are about
    "loop.py": "is at the start of a step",
    "step.py": "is before the optimizer step",
    "manual.py": "is at the end of a step",
    "evaluation.py": "is at a batch of the evaluation",
    "eval_batches.py": "is at a batch of the evaluation",
}
_POINT_TO_POINT = ("send", "recv", "isend", "irecv")


class _Place(NamedTuple):
    """A frame: its file, line and function."""

    file: str
    line: int
    function: str


class Locator:
    """Says where this rank is.

    Attributes:
        world: None: it has not joined one.
    """

    def __init__(self) -> None:
        self.world: World | None = None
        self._stacks: TextIO | None = None

    def enter(self, world: World) -> None:
        """Take a place in the world, and be ready to write stacks to a file."""
        self.world = world
        path = stack_file(Path(world.request.directory), world.rank)
        path.unlink(missing_ok=True)  # that of an engine which had this rank before
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        before, self._stacks = self._stacks, os.fdopen(descriptor, "w")
        faulthandler.register(STACK_SIGNAL, file=self._stacks, all_threads=False, chain=False)
        if before is not None:
            before.close()

    def of_error(self, error: BaseException) -> Whereabouts:
        """Return where the main thread was when something was raised."""
        places = _places(error)
        if error.__context__ is not None and is_broken_transport(error.__context__):
            places += _places(error.__context__)  # interrupted while that one was on its way up
        if self.world is not None:
            if isinstance(error, DivergedError):
                return _at(places, doing=error.issued, missing=(error.peer,))
            if diverged := self.world.groups.diverged:
                return _at(places, doing=diverged)
        return self._of(places)

    def of_main_thread(self) -> Whereabouts:
        """Return where the main thread is now; for another thread.

        In a backward on CUDA a thread of torch's runs the hooks that issue collectives.
        """
        threads = {key: _standing(frame) for key, frame in sys._current_frames().items()}
        places = threads.pop(threading.main_thread().ident or 0, [])
        if places and places[-1].function == torch_private.BACKWARD_FUNCTION:
            for others in threads.values():
                if any(_DISTRIBUTED in place.file for place in others):
                    places += others
        return self._of(places)

    def _of(self, places: Sequence[_Place]) -> Whereabouts:
        """Return where a rank is whose frames stand at some places, the outermost first."""
        world = self.world
        if world is None:
            return _at(places)
        waited = world.vote.waiting
        if waited is not None:
            files = [Path(place.file).name for place in places]
            about = next(
                (_VOTES[f] for f in reversed(files) if f in _VOTES), "agrees with the others"
            )
            return _at(places, doing=about, missing=(waited.peer,), since=waited.since)
        called = _library_calls(places)
        if any(_LOADER in place.file for place in called):
            return _at(places, doing="reads data")
        if not any(_DISTRIBUTED in place.file for place in called):
            return _at(places)
        message = next((p.function for p in called if p.function in _POINT_TO_POINT), "")
        if message:
            around = world.groups.surroundings
            peers = () if around.message_peer is None else (around.message_peer,)
            where = _at(places, doing=f"calls {message}", missing=peers, since=around.message_at)
            return replace(where, is_message=True)
        issued, missing, since = world.groups.newest()
        return _at(places, doing=issued, missing=missing, since=since) if missing else _at(places)


def _places(error: BaseException) -> list[_Place]:
    places, trace = [], error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        places.append(_Place(code.co_filename, trace.tb_lineno, code.co_name))
        trace = trace.tb_next
    return places


def _standing(frame: FrameType | None) -> list[_Place]:
    places = []
    while frame is not None:
        code = frame.f_code
        places.append(_Place(code.co_filename, frame.f_lineno or 0, code.co_name))
        frame = frame.f_back
    return places[::-1]


def _library_calls(places: Sequence[_Place]) -> Sequence[_Place]:
    """Return the frames below the innermost of a person's own."""
    own = [number for number, place in enumerate(places) if is_persons(place.file)]
    return places[own[-1] + 1 :] if own else places


def _at(
    places: Sequence[_Place],
    *,
    doing: str = "",
    missing: tuple[int, ...] = (),
    since: float | None = None,
) -> Whereabouts:
    # what runs is the outermost cell; a function of it may be of an earlier one
    running = next((p.file for p in places if p.file.startswith(PREFIX)), None)
    cell = next((p for p in reversed(places) if p.file == running), None)
    own = next((p for p in reversed(places) if is_persons(p.file)), None)
    inner = "" if own is None or own == cell else f"{Path(own.file).name}:{own.line}"
    if cell is None:
        source = "backward" if any(place.function == "backward" for place in places) else ""
    else:
        source = encodable(linecache.getline(cell.file, cell.line).strip())
    return Whereabouts(
        line=None if cell is None else cell.line,
        source=source,
        inner=encodable(inner),
        doing=encodable(doing),
        missing=missing,
        seconds=0.0 if since is None else time.monotonic() - since,
    )


LOCATOR = Locator()
"""Of this process, which has one main thread."""
