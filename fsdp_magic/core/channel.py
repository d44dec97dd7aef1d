"""What crosses the channel between the kernel and an engine of its own host; pure.

A channel is a pair of connected Unix sockets: no port, no file, nobody else can open it. One
message is one frame: eight bytes that say how long it is, then the pickled message.
"""

from __future__ import annotations

import json
import pickle
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

from fsdp_magic.core.errors import FsdpError
from fsdp_magic.core.reply import HelloReport, Reply

CHANNEL_VARIABLE = "FSDP_MAGIC_CHANNEL"
"""Environment of an engine: the number of its open descriptor; removed before cells run."""

_LENGTH = struct.Struct("!Q")


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Kernel to engine: do a verb. ``number`` comes back with everything that it leads to."""

    number: int
    verb: str
    request: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """Engine to kernel, once: it can be asked.

    Attributes:
        engine_id: what ipyparallel calls it.
        hello: who it is.
    """

    engine_id: int
    hello: HelloReport


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """Engine to kernel: what a verb printed, displayed or published, as Jupyter says it.

    Attributes:
        number: of the request.
        header, content: of the Jupyter message, in JSON.
        buffers: its buffers.
    """

    number: int
    header: bytes
    content: bytes
    buffers: tuple[bytes, ...] = ()

    def message(self) -> dict[str, Any]:
        """Return the Jupyter message.

        Jupyter packs a file name that is no UTF-8 (``surrogateescape``) as the bytes that it was.
        """
        header, content = (
            json.loads(x.decode(errors="replace")) for x in (self.header, self.content)
        )
        return {"header": header, "content": content, "buffers": list(self.buffers)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """Engine to kernel: a verb's answer; everything that it published came before.

    Attributes:
        number: of the request.
        reply: the ``Reply``, pickled by itself: a person's own objects may be in its report, and
            what cannot be read must not stop the channel.
    """

    number: int
    reply: bytes

    def answer(self) -> Reply | FsdpError:
        """Return the reply, or the error of one that cannot be read here."""
        try:
            return cast(Reply, pickle.loads(self.reply))
        except Exception as error:  # whatever an object's own unpickling raises
            return FsdpError(
                f"an engine's answer cannot be read in the notebook: {error}; let the cell leave "
                "numbers, text or arrays instead"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Unreadable:
    """Stands for a message that could not be unpickled. ``reason`` says why."""

    reason: str


class ChannelClosedError(Exception):
    """The other side of a channel is gone."""


def framed(message: Any) -> tuple[bytes, bytes]:
    """Return a message as what to send: its length, and itself."""
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(body)), body


class Frames:
    """Cuts what arrives on a stream into messages."""

    def __init__(self) -> None:
        self._waiting = bytearray()

    def add(self, data: bytes) -> Iterator[Any]:
        """Take what arrived, and yield every message that is complete.

        Raises:
            ChannelClosedError: if nothing arrived, which is how a stream says that it ended.
        """
        if not data:
            raise ChannelClosedError
        self._waiting += data
        while (end := self._end_of_first()) is not None:
            with memoryview(self._waiting) as view, view[_LENGTH.size : end] as body:
                message = _unpickled(body)
            del self._waiting[:end]
            yield message

    def _end_of_first(self) -> int | None:
        """Return where the first message ends, if it is complete."""
        if len(self._waiting) < _LENGTH.size:
            return None
        end = _LENGTH.size + int(_LENGTH.unpack_from(self._waiting)[0])
        return end if len(self._waiting) >= end else None


def _unpickled(body: memoryview) -> Any:
    try:
        return pickle.loads(body)
    except Exception as error:  # whatever an object's own unpickling raises
        return Unreadable(reason=f"{type(error).__name__}: {error}")
