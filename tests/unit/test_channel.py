"""Messages are cut out of a stream whole, however it arrives."""

from __future__ import annotations

import pytest

from fsdp_magic.core.channel import Asked, ChannelClosedError, Frames, Published, framed


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
