"""Messages are cut out of a stream whole, however it arrives, and sent without waiting."""

from __future__ import annotations

import queue
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from fsdp_magic.core.channel import (
    Asked,
    ChannelClosedError,
    Frames,
    Published,
    Unreadable,
    framed,
)
from fsdp_magic.notebook.channel import Channels


@pytest.mark.parametrize("piece", [1, 7, 8, 9, 64, 10_000])
def test_messages_come_whole_and_in_order_however_the_stream_is_cut(piece: int) -> None:
    sent = [Asked(number=n, verb="run", request="x" * (n * 40)) for n in range(6)]
    stream = b"".join(part for message in sent for part in framed(message))
    frames = Frames()
    pieces = [stream[start : start + piece] for start in range(0, len(stream), piece)]
    assert [message for data in pieces for message in frames.add(data)] == sent


def test_the_end_of_a_stream_is_an_error() -> None:
    with pytest.raises(ChannelClosedError):
        list(Frames().add(b""))


def test_what_is_published_is_a_message_again() -> None:
    published = Published(
        number=1, header=b'{"msg_type": "stream"}', content=b'{"text": "hi"}', buffers=(b"x",)
    )
    assert published.message() == {
        "header": {"msg_type": "stream"},
        "content": {"text": "hi"},
        "buffers": [b"x"],
    }


def test_what_is_published_may_be_no_utf_8() -> None:
    published = Published(number=1, header=b"{}", content=b'{"text": "caf\xe9"}')
    assert published.message()["content"] == {"text": "caf\ufffd"}


class Odd:
    def __reduce__(self) -> Any:
        return int, ("no number",)


def test_a_message_that_cannot_be_read_does_not_hide_the_next() -> None:
    stream = b"".join(part for message in (Odd(), "next") for part in framed(message))
    unreadable, following = Frames().add(stream)
    assert isinstance(unreadable, Unreadable)
    assert "no number" in unreadable.reason
    assert following == "next"


class Heard:
    """What a channel brought, and what nobody could take."""

    def __init__(self) -> None:
        self.taken: queue.Queue[Any] = queue.Queue()
        self.lost: queue.Queue[Any] = queue.Queue()

    def take(self, order: int, message: Any) -> None:
        self.taken.put((order, 1 / message))

    def lose(self, order: int, message: Any, error: Exception) -> None:
        self.lost.put((order, message, type(error)))


@pytest.fixture
def heard() -> Heard:
    return Heard()


@pytest.fixture
def engines_side(heard: Heard) -> Iterator[tuple[Channels, socket.socket]]:
    ours, theirs = socket.socketpair()
    channels = Channels(heard.take, heard.lose)
    channels.start({3: ours})
    with theirs:
        yield channels, theirs
        channels.close()


def test_a_message_that_nobody_can_take_does_not_end_the_reading(
    engines_side: tuple[Channels, socket.socket], heard: Heard
) -> None:
    _, theirs = engines_side
    for message in (0, 2):
        theirs.sendall(b"".join(framed(message)))
    assert heard.lost.get(timeout=5) == (3, 0, ZeroDivisionError)
    assert heard.taken.get(timeout=5) == (3, 0.5)


def test_a_large_request_does_not_wait_for_an_engine_that_stands_still(
    engines_side: tuple[Channels, socket.socket], heard: Heard
) -> None:
    channels, theirs = engines_side
    sent = [Asked(number=n, verb="push", request=bytes([n]) * 3_000_000) for n in range(3)]
    for message in sent:
        channels.send(3, message)  # nobody reads, and this comes back all the same
    theirs.sendall(b"".join(framed(2)))
    assert heard.taken.get(timeout=5) == (3, 0.5)
    frames, received = Frames(), list[Any]()
    while len(received) < len(sent):
        received += frames.add(theirs.recv(1 << 20))
    assert received == sent


def test_a_request_to_an_engine_that_is_gone_is_no_error(
    engines_side: tuple[Channels, socket.socket],
) -> None:
    channels, theirs = engines_side
    theirs.close()
    channels.send(3, Asked(number=1, verb="run", request=bytes(1_000_000)))
