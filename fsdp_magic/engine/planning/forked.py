"""ENGINE: something done in a fork of the engine, which stays as it is whatever comes of it.

The child has one thread, no group, no kernel: it computes, writes its answer to a pipe and ends.
It ends with the engine, and at once when nobody wants its answer any more.
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
    reading, writing = os.pipe()
    engine = os.getpid()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python's own, of threads
        pid = os.fork()
    if pid == 0:
        _live(work, writing, engine)
    os.close(writing)
    ended = False
    try:
        answer = _read(reading)
        status = os.waitpid(pid, 0)[1]
        ended = True
    finally:
        os.close(reading)
        if not ended:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    if answer is None:
        raise _without_answer(os.waitstatus_to_exitcode(status))
    return answer


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
