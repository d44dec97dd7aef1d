"""ENGINE: an ipyparallel engine that offers our verbs.

torch is imported at the top: an engine is useless without it, and by then the watcher is there.
tqdm comes before IPython: an import after it would take the engine for a notebook, and warn that
it lacks a notebook's widgets.
"""

from __future__ import annotations

import atexit
import builtins
import ctypes
import gc
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch.distributed.fsdp
import torch.distributed.tensor  # noqa: F401
import tqdm.auto  # type: ignore[import-untyped]  # noqa: F401
from ipyparallel.engine.app import IPEngine
from traitlets import default

from fsdp_magic.core.protocol import CALL_NAME, DIGESTS
from fsdp_magic.engine import cell_sources, terminal
from fsdp_magic.engine.interrupts import INTERRUPTS
from fsdp_magic.engine.printing import PRINTING
from fsdp_magic.engine.streams import WatchedStream
from fsdp_magic.engine.verbs import Engine

_PR_SET_PDEATHSIG = 1


class EngineApplication(IPEngine):  # type: ignore[misc]  # ipyparallel is untyped
    """The engine's process."""

    @default("out_stream_factory")
    def _out_stream_factory(self) -> type[WatchedStream]:
        return WatchedStream

    def init_signal(self) -> None:
        """Take over SIGINT and offer the verbs; called once the kernel object is there."""
        super().init_signal()
        self.session.digest_history_size = DIGESTS
        INTERRUPTS.install()
        signal.signal(signal.SIGTERM, _leave)
        _keep_handler(self.kernel)
        terminal.replace(self.kernel.shell)
        cell_sources.install()
        engine = Engine(shell=self.kernel.shell)
        setattr(builtins, CALL_NAME, engine.call)
        os.register_at_fork(after_in_child=_die_with_parent)

    def redirect_output(self, iopub_socket: Any) -> None:
        """Publish what is printed, through our reports."""
        super().redirect_output(iopub_socket)
        PRINTING.install(self.kernel.shell)


def _keep_handler(kernel: Any) -> None:
    """Keep ipykernel from swapping the SIGINT handler around each of our requests.

    Plain executions (``%%px``) still get Python's own handler while they run.
    """
    execute = kernel.do_execute

    async def do_execute(*args: Any, **kwargs: Any) -> Any:
        with _default_handler():
            return await execute(*args, **kwargs)

    kernel.do_execute = do_execute
    kernel.pre_handler_hook = lambda: None
    kernel.post_handler_hook = lambda: None


@contextmanager
def _default_handler() -> Iterator[None]:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        INTERRUPTS.install()


def _leave(number: int, frame: FrameType | None) -> None:
    """End at once, after the person's exit functions; tearing torch down takes a second."""
    gc.freeze()  # IPython collects garbage at exit: half a second for what ends here anyway
    atexit._run_exitfuncs()
    os._exit(0)


def _die_with_parent() -> None:
    """Make a forked child (a DataLoader's worker) die with the engine.

    A worker that outlives it would hold the engine's sockets open, and its peers would wait.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
