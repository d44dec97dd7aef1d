"""ENGINE: something done in a fork of this process, which stays as it is whatever comes of it.

The child has one thread, no group, no kernel: it computes, writes its answer to a pipe and ends.
It ends with its parent, an engine or the tracer, and at once when nobody wants its answer.
"""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import signal
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn

import torch

from fsdp_magic.core.channel import ChannelClosedError, Frames, framed
from fsdp_magic.core.errors import FsdpError
from fsdp_magic.core.planning.requests import TraceFailed
from fsdp_magic.engine import cells

_PR_SET_PDEATHSIG = 1
"""Source: linux/prctl.h."""
_CHUNK_BYTES = 1 << 20


def in_fork(work: Callable[[], Any]) -> Any:
    """Return what something gives in a fork of this process, or a ``TraceFailed``.

    Args:
        work: called in the child; what it gives is pickled.

    Raises:
        FsdpError: if the child ended without an answer.
        KeyboardInterrupt: if the person interrupted; the child is gone.
    """
    with Fork(work) as fork:
        return fork.answer()


class Fork:
    """Something done in a fork of this process while this one goes on; a context manager.

    Args:
        work: called in the child; what it gives is pickled.
    """

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work = work

    def __enter__(self) -> Fork:
        """Fork."""
        self._reading, writing = os.pipe()
        parent = os.getpid()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python's own, of threads
            self._pid = os.fork()
        if self._pid == 0:
            _live(self._work, writing, parent)
        os.close(writing)
        self._ended = False
        return self

    def answer(self) -> Any:
        """Wait for what the child gives, or a ``TraceFailed``, and return it.

        Raises:
            FsdpError: if the child ended without an answer.
        """
        answer = _read(self._reading)
        status = os.waitpid(self._pid, 0)[1]
        self._ended = True
        if answer is None:
            raise _without_answer(os.waitstatus_to_exitcode(status))
        return answer

    def __exit__(self, *error: object) -> None:
        """End the child, if it has not."""
        os.close(self._reading)
        if not self._ended:
            with suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)


def _read(reading: int) -> Any:
    """Return the message on a pipe; None if it ends before one."""
    frames = Frames()
    with suppress(ChannelClosedError):
        while True:
            for message in frames.add(os.read(reading, _CHUNK_BYTES)):
                return message
    return None


def _without_answer(code: int) -> FsdpError:
    how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return FsdpError(
        f"the planning process of rank 0 ended without an answer ({how}); the engine is as it was: "
        "write model and loss into a %%fsdp_plan cell, which runs in a process of its own"
    )


def _live(work: Callable[[], Any], writing: int, engine: int) -> NoReturn:
    """Be the child: answer, and end without the engine's exit functions."""
    try:
        _leave_engine(engine)
        try:
            answer = work()
        except BaseException as error:  # the engine must get an answer whatever happened
            answer = TraceFailed(failure=cells.describe(error))
        data = memoryview(b"".join(framed(answer)))
        while data:
            data = data[os.write(writing, data) :]
    finally:
        os._exit(0)


def _leave_engine(engine: int) -> None:
    """Cut what ties a fresh child to its engine."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != engine:
        os._exit(1)  # it died before we asked
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115  # for the life of the process
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))  # a device's limit is not the child's
    torch.set_num_threads(1)  # the threads of OpenMP stayed behind
    gc.freeze()  # what is the engine's is not collected here
