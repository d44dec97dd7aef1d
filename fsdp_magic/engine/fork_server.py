"""FORK SERVER: ``python -m fsdp_magic.engine.fork_server N`` makes the engines of one session.

It imports once what the controller and every engine need, and then forks them: a fork takes
milliseconds where an import of torch takes seconds, and the memory of the imports is shared. It
speaks with the kernel over the socket with descriptor N, and runs nothing of the person's: what
engines import is imported in engines only, so fresh engines are fresh.

As their parent it alone learns how its processes end, and says so at once. If it ends, they
live on: each has a watcher of its own, and the kernel holds a descriptor of each. It forks only
while it has one thread and CUDA is untouched. Its engines share one hash seed, so a set of
strings has the same order on every rank; any other source of chance is made fresh.
"""

from __future__ import annotations

import gc
import os
import select
import socket
import sys
import warnings
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp_magic.core.channel import CHANNEL_VARIABLE, ChannelClosedError, Frames, framed
from fsdp_magic.core.forking import EndedReport, ForkedReport, ForkRequest, RefusedReport
from fsdp_magic.engine.watcher import guard, kernel_descriptor

_CHUNK_BYTES = 1 << 16


def main() -> None:
    """Guard the server, serve; a forked child returns from serving, and becomes what was asked."""
    directory = os.environ.get("IPP_PROFILE_DIR")
    kernel = kernel_descriptor(remove=directory)
    guard(kernel, remove=directory)
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # looking for GPUs must not touch CUDA
    gc.disable()  # what is imported stays, and looking through it again and again costs 0.3 s
    server = _ForkServer(socket.socket(fileno=int(sys.argv[1])))
    import ipyparallel.controller.app  # noqa: F401

    child = server.serve_one()
    if child is None:
        import fsdp_magic.engine.application  # noqa: F401

        child = server.serve()
    _become(child, kernel)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Child:
    number: int
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """A request, and the descriptor that came with it."""

    request: ForkRequest
    channel: int | None


class _ForkServer:
    """The server's side of its socket, and its children by process descriptor."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._frames = Frames()
        self._waiting: list[ForkRequest] = []
        self._channels: list[int] = []
        self._children: dict[int, _Child] = {}

    def serve_one(self) -> _Asked | None:
        """Answer one request; return it in the child that it makes."""
        while not self._waiting:
            self._receive()
        return self._fork(self._waiting.pop(0))

    def serve(self) -> _Asked:
        """Answer requests and report ends until the kernel is gone; return in children only."""
        gc.freeze()  # else each engine's first collection would copy every page
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        while True:
            for descriptor in self._children:
                poll.register(descriptor, select.POLLIN)
            for descriptor, _ in [] if self._waiting else poll.poll():
                if descriptor == self._control.fileno():
                    self._receive()
                else:
                    poll.unregister(descriptor)
                    self._report_end(descriptor)
            for request in self._taken():
                child = self._fork(request)
                if child is not None:
                    return child

    def _taken(self) -> list[ForkRequest]:
        taken, self._waiting = self._waiting, []
        return taken

    def _receive(self) -> None:
        data, descriptors, _, _ = socket.recv_fds(
            self._control, _CHUNK_BYTES, 1, socket.MSG_CMSG_CLOEXEC
        )
        self._channels += descriptors
        try:
            self._waiting += self._frames.add(data)
        except ChannelClosedError:
            os._exit(0)  # the kernel has no use for the server any more

    def _fork(self, request: ForkRequest) -> _Asked | None:
        """Make a process; return the request in it, and None in the server."""
        channel = self._channels.pop(0) if request.channel else None
        reason = _why_not()
        if reason is not None:
            self._send(RefusedReport(number=request.number, reason=reason))
        else:
            told, tell = os.pipe()
            pid = os.fork()
            if pid == 0:
                os.close(tell)
                self._leave()
                _wait_until_told(told)
                return _Asked(request=request, channel=channel)
            os.close(told)
            descriptor = os.pidfd_open(pid)
            self._children[descriptor] = _Child(number=request.number, pid=pid)
            self._send(ForkedReport(number=request.number, pid=pid), descriptor)
            with suppress(BrokenPipeError):  # it has ended already, which is told by itself
                os.write(tell, b".")
            os.close(tell)
        if channel is not None:
            os.close(channel)
        return None

    def _leave(self) -> None:
        """Close in a child what is the server's."""
        self._control.close()
        for descriptor in (*self._children, *self._channels):
            os.close(descriptor)

    def _report_end(self, descriptor: int) -> None:
        child = self._children.pop(descriptor)
        _, status = os.waitpid(child.pid, 0)
        os.close(descriptor)
        code = os.waitstatus_to_exitcode(status)
        self._send(EndedReport(number=child.number, exit_code=code))

    def _send(self, report: Any, *descriptors: int) -> None:
        try:
            socket.send_fds(self._control, [b"".join(framed(report))], list(descriptors))
        except OSError:  # the kernel is gone
            os._exit(0)


def _wait_until_told(told: int) -> None:
    """End this child if the server ends before the kernel can know of it, who would end it."""
    if not os.read(told, 1):
        os._exit(1)
    os.close(told)


def _why_not() -> str | None:
    """Return why it is not safe to fork now; None: it is.

    A fork copies one thread: a lock that another one holds would stay locked for ever. OpenBLAS
    starts threads when numpy is imported, but ends them before any fork, so the first fork, of
    a child that does nothing, makes an end of them. Source: OpenBLAS, blas_server.c and
    memory.c, openblas_fork_handler.
    """
    if _threads() > 1:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python's own, of threads
            pid = os.fork()
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
    if _threads() > 1:
        return f"{_threads()} threads are running in the fork server"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "CUDA is initialised in the fork server"
    return None


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _become(asked: _Asked, kernel: int) -> None:
    """Turn a forked child into what was asked for, as if it had been started by its command."""
    request = asked.request
    os.setsid()
    _take_standard_streams(request.output)
    os.environ.clear()
    os.environ.update(request.environment)
    if asked.channel is not None:
        os.environ[CHANNEL_VARIABLE] = str(asked.channel)
    os.chdir(request.directory)
    sys.argv = [str(Path(__file__).with_name("__main__.py")), *request.arguments]
    Path("/proc/self/comm").write_text(f"fsdp {request.role}")  # what ``top`` shows
    if request.role == "controller":
        from fsdp_magic.engine import controller

        guard(kernel, remove=os.environ.get("IPP_PROFILE_DIR"))
        os.close(kernel)
        gc.enable()
        controller.run()
    else:
        from fsdp_magic.engine import __main__ as engine

        guard(kernel)
        os.close(kernel)
        gc.enable()
        _make_chance_fresh()
        engine.run()


def _take_standard_streams(output: str) -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    log = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for source, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.close(null)
    os.close(log)


def _make_chance_fresh() -> None:
    """Give a forked engine its own chance, and its own view of the files that came since.

    Python's ``random``, ``uuid``, ``secrets`` and ``tempfile`` see to it themselves; torch
    begins with a constant in any process.
    """
    import importlib
    import multiprocessing

    import numpy

    numpy.random.seed()
    multiprocessing.current_process().authkey = os.urandom(32)
    importlib.invalidate_caches()


if __name__ == "__main__":
    main()
