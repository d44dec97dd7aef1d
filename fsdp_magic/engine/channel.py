"""ENGINE: the channel to the kernel, which our verbs take; see ``notebook/channel.py``.

Requests are read on the engine's event loop and done in its main thread, one at a time, before or
after a ``%%px`` of the person's. What a verb prints, displays or publishes goes the way that
ipykernel gives it, to the thread that publishes; the socket at its end is ours, and sends on the
channel what belongs to a request from there. The answer takes the same way once the streams are
flushed, so it comes after everything before it.
"""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from jupyter_client.session import DELIM

from fsdp_magic.core.channel import (
    CHANNEL_VARIABLE,
    Asked,
    ChannelClosedError,
    Finished,
    Frames,
    Published,
    Ready,
    framed,
)
from fsdp_magic.core.protocol import HelloRequest
from fsdp_magic.core.reply import HelloReport, Reply
from fsdp_magic.engine import cells
from fsdp_magic.engine.verbs import Engine

_CHUNK_BYTES = 1 << 20
_REQUEST = "fsdp_magic-"


def open_channel(kernel: Any, engine: Engine) -> None:
    """Serve the channel that this engine was started with, if any.

    Args:
        kernel: its ipykernel, whose loop is running.
        engine: does the verbs.
    """
    number = os.environ.pop(CHANNEL_VARIABLE, None)
    if number is None:
        return
    channel = _Channel(socket.socket(fileno=int(number)), kernel, engine)
    channel.open()


class _Channel:
    def __init__(self, connection: socket.socket, kernel: Any, engine: Engine) -> None:
        self._socket = connection
        self._kernel = kernel
        self._engine = engine
        self._frames = Frames()
        self._publisher = kernel.iopub_socket

    def open(self) -> None:
        """Say that the engine is ready, and serve from now on."""
        self._socket.set_inheritable(False)
        self._publisher.socket = _PublishingSocket(self._publisher.socket, self)
        asyncio.get_running_loop().add_reader(self._socket, self._receive)
        hello = self._engine.call("hello", HelloRequest()).report
        assert isinstance(hello, HelloReport)
        self._send_in_order(Ready(engine_id=self._kernel.engine_id, hello=hello))

    def send(self, message: Any) -> None:
        """Send a message to the kernel; called in the thread that publishes, and only there."""
        length, body = framed(message)
        with suppress(OSError):  # the kernel is gone, and the watcher knows
            self._socket.sendall(length + body)

    def _send_in_order(self, message: Any) -> None:
        """Send a message after everything that was published before.

        In two turns of the publishing thread: what is published in it, as the streams do when
        they are flushed, is itself sent a turn later.
        """
        schedule = self._publisher.schedule
        schedule(lambda: schedule(partial(self.send, message)))

    def _receive(self) -> None:
        try:
            for asked in self._frames.add(self._socket.recv(_CHUNK_BYTES)):
                self._do(asked)
        except (OSError, ChannelClosedError):
            os._exit(0)  # the kernel has given this engine up, or is gone

    def _do(self, asked: Asked) -> None:
        self._kernel.set_parent([], _request_message(asked.number))
        reply = self._engine.call(asked.verb, asked.request)
        self._send_in_order(Finished(number=asked.number, reply=_pickled(reply)))


def _pickled(reply: Reply) -> bytes:
    try:
        return pickle.dumps(reply, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # whatever an object's own pickling raises
        return pickle.dumps(replace(reply, report=None, failure=cells.describe(error)))


class _PublishingSocket:
    """Stands for the socket on which an engine publishes; its thread alone sends on it."""

    def __init__(self, replaced: Any, channel: _Channel) -> None:
        self._replaced = replaced
        self._channel = channel
        self._pid = os.getpid()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._replaced, name)

    def send_multipart(self, parts: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        """Send on the channel what belongs to a request from there, and on the socket the rest."""
        ours = os.getpid() == self._pid  # what a forked child sent would run into its parent's
        published = _published(parts) if ours else None
        if published is None:
            return self._replaced.send_multipart(parts, *args, **kwargs)
        return self._channel.send(published)


def _published(parts: Sequence[Any]) -> Published | None:
    """Return a Jupyter message for the channel; None if its parent came another way.

    Source: the wire protocol of Jupyter messaging: identities, a delimiter, signature, header,
    parent header, metadata, content, buffers.
    """
    frames = [bytes(memoryview(part)) for part in parts[:8]]
    start = frames.index(DELIM) + 2
    header, parent, _, content = frames[start : start + 4]
    if _REQUEST.encode() not in parent:
        return None
    request = json.loads(parent)["msg_id"]
    if not request.startswith(_REQUEST):
        return None
    return Published(
        number=int(request.removeprefix(_REQUEST)),
        header=header,
        content=content,
        buffers=tuple(bytes(memoryview(part)) for part in parts[start + 4 :]),
    )


def _request_message(number: int) -> dict[str, Any]:
    """Return what ipykernel takes for the message that led to what is published next."""
    header = {"msg_id": f"{_REQUEST}{number}", "msg_type": "apply_request", "version": "5.3"}
    return {"header": header, "parent_header": {}, "metadata": {}, "content": {}, "buffers": []}
