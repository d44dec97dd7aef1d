"""KERNEL: the process that traces a cell: started, heard, and ended whatever happens.

Its two streams are read by a thread each, which works on any platform; the main thread waits for
what they say and can be interrupted. A process that the cell started in a session of its own may
hold the streams for long; nobody waits for that one.
"""

from __future__ import annotations

import codecs
import os
import queue
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Literal

from fsdp_magic.core.channel import ChannelClosedError, Frames, Unreadable, framed
from fsdp_magic.core.errors import CellInterrupted, FsdpError
from fsdp_magic.core.planning.requests import (
    TraceFailed,
    TracePrinted,
    TraceReport,
    TraceRequest,
)
from fsdp_magic.core.protocol import KERNEL_PID_VARIABLE

_CHUNK_BYTES = 1 << 16
_TICK_SECONDS = 0.1
_STOP_SECONDS = 5.0
_COMMAND = (sys.executable, "-m", "fsdp_magic.engine.planning")

Printed = Callable[[str, str], None]
Stream = Literal["answers", "text"]
Event = TracePrinted | TraceReport | TraceFailed | Unreadable | Stream
"""A stream: it ended."""


def traced(request: TraceRequest, *, printed: Printed) -> TraceReport | TraceFailed:
    """Trace a cell in a process of its own.

    Args:
        request: the cell.
        printed: called with the stream and text of what it prints.

    Raises:
        CellInterrupted: if the person interrupted it; nothing of it is left.
        FsdpError: if the process ended without an answer.
    """
    process = _started()
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    over = threading.Event()
    threads = [
        threading.Thread(
            target=reads, args=(stream, events, over), name="fsdp_magic plan", daemon=True
        )
        for reads, stream in ((_read_answers, process.stdout), (_read_text, process.stderr))
    ]
    try:
        for thread in threads:
            thread.start()
        _ask(process, request)
        return _answer(process, events, printed)
    except KeyboardInterrupt:
        raise CellInterrupted(
            "interrupted; nothing was planned and nothing is left of it"
        ) from None
    finally:
        _end(process)
        over.set()
        for thread in threads:
            thread.join(timeout=_STOP_SECONDS)
        for stream in (process.stdin, process.stdout, process.stderr):
            with suppress(OSError):  # what was written last cannot be any more
                stream.close()  # type: ignore[union-attr]


def _started() -> subprocess.Popen[bytes]:
    """Start the process, in a session of its own: Jupyter interrupts the kernel's whole group."""
    package = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), package)))
    return subprocess.Popen(
        _COMMAND,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": path, KERNEL_PID_VARIABLE: str(os.getpid())},
    )


def _ask(process: subprocess.Popen[bytes], request: TraceRequest) -> None:
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # it has ended, which is told where its answer is missed
        process.stdin.write(b"".join(framed(request)))
        process.stdin.flush()


def _answer(
    process: subprocess.Popen[bytes], events: queue.SimpleQueue[Event], printed: Printed
) -> TraceReport | TraceFailed:
    """Return the answer; what is printed on the way is handed on."""
    open_streams: set[Stream] = {"answers", "text"}
    while open_streams:
        try:
            event = events.get(timeout=_TICK_SECONDS)
        except queue.Empty:  # so that an interrupt is seen on any platform
            if "answers" not in open_streams and process.poll() is not None:
                break  # whoever holds the other one does not answer
            continue
        match event:
            case TraceReport() | TraceFailed():
                return event
            case TracePrinted():
                printed(event.stream, event.text)
            case Unreadable():
                raise FsdpError(f"the answer of the planning process is unreadable: {event.reason}")
            case "answers" | "text":
                open_streams.discard(event)
    raise _ended(process)


def _ended(process: subprocess.Popen[bytes]) -> FsdpError:
    """Return the error that tells how the process ended without an answer."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout=_STOP_SECONDS)
    code = process.returncode
    if code is None or code >= 0:
        return FsdpError(
            f"the planning process ended by itself (exit code {code}) before it had an answer; "
            "take exit() and os._exit() out of the cell"
        )
    name = signal.Signals(-code).name
    if -code == getattr(signal, "SIGKILL", None):
        return FsdpError(
            "the planning process was killed (SIGKILL), as a system does where memory runs out: "
            "let the cell load no data or weights, only build `model`, as "
            "AutoModelForCausalLM.from_config(config) does"
        )
    return FsdpError(
        f"the planning process crashed ({name}) while it ran the cell without memory; code of its "
        "own in C or CUDA (a custom kernel, say) cannot run on tensors that hold nothing: leave "
        "it out for the plan, or put plain torch in its place"
    )


def _read(stream: BinaryIO, over: threading.Event) -> bytes:
    """Return what comes next; nothing: the stream ended, or nobody listens any more."""
    if hasattr(select, "poll"):  # elsewhere a thread can wait for what it reads only
        poll = select.poll()
        poll.register(stream, select.POLLIN)
        while not poll.poll(1000 * _TICK_SECONDS):
            if over.is_set():
                return b""
    return os.read(stream.fileno(), _CHUNK_BYTES)


def _read_answers(
    stream: BinaryIO, events: queue.SimpleQueue[Event], over: threading.Event
) -> None:
    frames = Frames()
    with suppress(ChannelClosedError, ValueError):  # closed there, or here
        while True:
            for message in frames.add(_read(stream, over)):
                events.put(message)
    events.put("answers")


def _read_text(stream: BinaryIO, events: queue.SimpleQueue[Event], over: threading.Event) -> None:
    """Hand on what C code and commands print."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    with suppress(ValueError, OSError):
        while data := _read(stream, over):
            events.put(TracePrinted(stream="stderr", text=decoder.decode(data)))
    events.put("text")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the process and whatever it has started in its group, unless it has been seen to end."""
    if process.returncode is not None:
        return
    group: Any = getattr(os, "killpg", None)
    with suppress(ProcessLookupError, PermissionError):
        if group is not None:
            group(process.pid, signal.SIGKILL)
        else:
            process.kill()
    process.wait()
