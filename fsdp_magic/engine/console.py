"""ENGINE: a door for one console, opened when asked: ports on loopback and a file with the key.

An engine is a Jupyter kernel that answers its controller. This makes it listen as well, on the
sockets it has; each is bound by the thread that owns it, because a socket is one thread's.

Source: ``IPEngine.bind_kernel`` of ipyparallel 9, which binds all of them in the main thread and
writes its file among the person's own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq
from ipykernel.heartbeat import Heartbeat
from jupyter_client.connect import write_connection_file

from fsdp_magic.engine.names import Names

_LOOPBACK = "127.0.0.1"
_BIND_SECONDS = 5.0


def open_console(engine: Any, path: Path) -> None:
    """Listen for a console.

    Args:
        engine: ipyparallel's engine.
        path: the connection file to write, readable by nobody else.
    """
    kernel = engine.kernel
    beat = Heartbeat(zmq.Context(), ("tcp", _LOOPBACK, 0))  # type: ignore[no-untyped-call]
    kernel.stdin_socket = engine.context.socket(zmq.ROUTER)
    ports = {
        "shell_port": _bound(engine.shell_socket, _here),
        "control_port": _bound(engine.control_socket, kernel.control_thread.io_loop.add_callback),
        "iopub_port": _bound(engine.iopub_socket, kernel.iopub_socket.schedule),
        "stdin_port": _bound(kernel.stdin_socket, _here),
        "hb_port": beat.port,
    }
    beat.start()
    write_connection_file(str(path), ip=_LOOPBACK, key=kernel.session.key, **ports)


def bind_names(kernel: Any, names: Names, values: Callable[[], dict[str, Any]]) -> None:
    """Bind the names that cells find also while a console runs something."""
    execute = kernel.do_execute

    async def do_execute(*args: Any, **kwargs: Any) -> Any:
        with names.bound(values()):
            return await execute(*args, **kwargs)

    kernel.do_execute = do_execute


def _here(bind: Callable[[], None]) -> None:
    bind()


def _bound(socket: Any, schedule: Callable[[Callable[[], None]], Any]) -> int:
    """Bind a socket to a free port on loopback, in the thread that ``schedule`` reaches."""
    ports: list[int] = []
    done = threading.Event()

    def bind() -> None:
        try:
            ports.append(socket.bind_to_random_port(f"tcp://{_LOOPBACK}"))
        finally:
            done.set()

    schedule(bind)
    if not done.wait(_BIND_SECONDS) or not ports:
        raise OSError("no free port on loopback for a console")
    return ports[0]
