"""ENGINE: an ipyparallel engine that offers our verbs.

torch is imported at the top: an engine is useless without it, and by then the watcher is there.
tqdm comes before IPython: an import after it would take the engine for a notebook, and warn that
it lacks a notebook's widgets.
"""

from __future__ import annotations

import asyncio
import atexit
import builtins
import ctypes
import gc
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed.fsdp
import torch.distributed.tensor  # noqa: F401
import tqdm.auto  # type: ignore[import-untyped]  # noqa: F401
from ipyparallel.engine.app import IPEngine
from traitlets import default

from fsdp_magic.core.protocol import CALL_NAME, DIGESTS
from fsdp_magic.engine import cell_sources, terminal
from fsdp_magic.engine.channel import open_channel
from fsdp_magic.engine.interrupts import INTERRUPTS
from fsdp_magic.engine.optimizer_steps import STEPS
from fsdp_magic.engine.printing import PRINTING
from fsdp_magic.engine.streams import WatchedStream
from fsdp_magic.engine.verbs import Engine

_PR_SET_PDEATHSIG = 1
_LOOK_SECONDS = 0.005


class EngineApplication(IPEngine):  # type: ignore[misc]  # ipyparallel is untyped
    """The engine's process."""

    @default("out_stream_factory")
    def _out_stream_factory(self) -> type[WatchedStream]:
        return WatchedStream

    def find_connection_file(self) -> None:
        """Find the file that says where the controller is, and wait until it is written.

        ipyparallel waits until it exists, looks every 100 ms, and reads it half written.
        """
        super().find_connection_file()
        deadline = time.monotonic() + self.wait_for_url_file
        while not _is_json(Path(self.url_file)) and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)

    def init_signal(self) -> None:
        """Take over SIGINT and offer the verbs; called once the kernel object is there."""
        super().init_signal()
        _find_modules_here()
        self.session.digest_history_size = DIGESTS
        INTERRUPTS.install()
        signal.signal(signal.SIGTERM, _leave)
        _keep_handler(self.kernel)
        terminal.replace(self.kernel.shell)
        self.kernel.control_handlers["signal_request"] = self._take_signal
        cell_sources.install()
        STEPS.install()
        engine = Engine(shell=self.kernel.shell)
        setattr(builtins, CALL_NAME, engine.call)
        os.register_at_fork(after_in_child=_begin_as_child)
        # once this turn of the loop has finished the registration
        asyncio.get_running_loop().call_soon(open_channel, self.kernel, engine)

    def _take_signal(self, stream: Any, identity: Any, request: Any) -> None:
        """Do what ipyparallel's nanny would, which is not there; for ``%%px``'s interrupts."""
        wanted = request["content"]["sig"]
        number = getattr(signal, wanted) if isinstance(wanted, str) else wanted
        os.kill(os.getpid(), number)
        self.session.send(stream, "signal_reply", {"status": "ok"}, parent=request, ident=identity)

    def redirect_output(self, iopub_socket: Any) -> None:
        """Publish what is printed, through our reports."""
        super().redirect_output(iopub_socket)
        PRINTING.install(self.kernel.shell)


def _find_modules_here() -> None:
    """Let cells import modules of the notebook's directory, as they do in its kernel.

    After Python's own library, before what is installed. Source: IPython, ``init_path``, which
    does not for a process that starts with ``-P``; ipyparallel puts the directory first, twice.
    """
    kept = [path for path in sys.path if path]
    after = (i for i, path in enumerate(kept) if Path(path).name.endswith("-packages"))
    kept.insert(next(after, len(kept)), "")
    sys.path[:] = kept


def _is_json(path: Path) -> bool:
    """Return whether a file is there and whole."""
    try:
        json.loads(path.read_text())
    except (OSError, ValueError):
        return False
    return True


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


def _begin_as_child() -> None:
    """Make a forked child (a DataLoader's worker) die with the engine, and leave its garbage alone.

    A worker that outlives it would hold the engine's sockets open, and its peers would wait. One
    that collected transports the engine has left would wait for their threads, which it has not.
    """
    gc.freeze()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
