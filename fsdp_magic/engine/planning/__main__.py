"""TRACER: ``python -m fsdp_magic.engine.planning`` traces one cell and ends.

It reads one ``TraceRequest`` from standard input and answers on what was its standard output.
From then on descriptor 1 leads to standard error: what the person's code prints in Python comes
as ``TracePrinted``, what C code or a command prints comes on standard error. It has no engines, no
group, no card; if the notebook's kernel ends, so does it.
"""

from __future__ import annotations

import io
import os
import sys
import threading
from contextlib import suppress
from typing import Any, BinaryIO, Literal

from fsdp_magic.core.channel import Frames, framed
from fsdp_magic.core.planning.requests import TraceFailed, TracePrinted, TraceRequest
from fsdp_magic.core.protocol import KERNEL_PID_VARIABLE

_CHUNK_BYTES = 1 << 16


def main() -> None:
    """Trace what is asked for."""
    _end_with_kernel()
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    request = _request(sys.stdin.buffer)
    sys.stdin = open(os.devnull)  # noqa: SIM115  # for the life of the process
    sys.stdout, sys.stderr = _Printed("stdout", answers), _Printed("stderr", answers)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a card that is here is somebody else's business
    answer = _answer(request)
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # whatever the cell has put in its place
            stream.flush()
    _send(answers, answer)
    os._exit(0)  # threads that the cell left must not keep it


def _answer(request: TraceRequest) -> Any:
    from fsdp_magic.engine import cells
    from fsdp_magic.engine.planning.traces import traced

    try:
        return traced(request)
    except BaseException as error:  # the kernel must get an answer whatever happened
        return TraceFailed(failure=cells.describe(error))


def _request(stdin: BinaryIO) -> TraceRequest:
    frames = Frames()
    while True:
        for message in frames.add(os.read(stdin.fileno(), _CHUNK_BYTES)):
            assert isinstance(message, TraceRequest)
            threading.Thread(target=_end_at_end_of, args=(stdin.fileno(),), daemon=True).start()
            return message


def _end_at_end_of(descriptor: int) -> None:
    """End this process when the kernel closes its side: it has gone, or wants no answer."""
    os.read(descriptor, 1)
    os._exit(1)


def _end_with_kernel() -> None:
    """Have a watcher end this process and what it starts, where there are process descriptors.

    A thread cannot do it while C code holds the interpreter's lock; elsewhere it must suffice.
    """
    if hasattr(os, "pidfd_open") and KERNEL_PID_VARIABLE in os.environ:
        from fsdp_magic.engine.watcher import guard, kernel_descriptor

        kernel = kernel_descriptor()
        guard(kernel)
        os.close(kernel)
        del os.environ[KERNEL_PID_VARIABLE]


def _send(answers: BinaryIO, message: Any) -> None:
    data = memoryview(b"".join(framed(message)))
    while data:
        data = data[answers.write(data) :]


class _Printed(io.TextIOBase):
    """A stream whose text goes to the kernel."""

    def __init__(self, stream: Literal["stdout", "stderr"], answers: BinaryIO) -> None:
        self._stream = stream
        self._answers = answers
        self._lock = threading.Lock()
        self._waiting = ""

    encoding = "utf-8"
    errors = "backslashreplace"

    def writable(self) -> bool:
        """Return that it can be written to."""
        return True

    def fileno(self) -> int:
        """Return the descriptor that C code and commands print to."""
        return 2

    def write(self, text: str) -> int:
        """Send lines to the kernel; what is no whole line waits."""
        with self._lock:
            self._waiting += text.encode(errors="backslashreplace").decode()
        if "\n" in text or "\r" in text:
            self.flush()
        return len(text)

    def flush(self) -> None:
        """Send what waits."""
        with self._lock:
            text, self._waiting = self._waiting, ""
            if text:
                _send(self._answers, TracePrinted(stream=self._stream, text=text))


if __name__ == "__main__":
    main()
