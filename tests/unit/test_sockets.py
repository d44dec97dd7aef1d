"""Connections of a process: whether something is under way in them, and breaking them."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import suppress

import pytest

from fsdp_magic.engine.sockets import is_quiet, recorded_sockets, shut_down

Pair = tuple[socket.socket, socket.socket, dict[int, str]]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Give both ends of a connection, and the record of the first with what listens."""
    listener = socket.create_server(("127.0.0.1", 0))
    far = socket.create_connection(listener.getsockname())
    near, _ = listener.accept()
    links = {s.fileno(): os.readlink(f"/proc/self/fd/{s.fileno()}") for s in (near, listener)}
    with listener, near, far:
        yield near, far, links


def test_what_is_not_read_yet_is_under_way(pair: Pair) -> None:
    near, far, links = pair
    assert is_quiet(links)
    far.sendall(b"1")
    assert not is_quiet(links)
    near.recv(1)
    assert is_quiet(links)


def test_what_the_peer_has_no_room_for_is_under_way(pair: Pair) -> None:
    near, _, links = pair
    near.setblocking(False)
    with suppress(BlockingIOError):
        while True:
            near.send(bytes(1 << 16))
    assert not is_quiet(links)


def test_a_connection_is_shut_down_and_what_listens_is_not(pair: Pair) -> None:
    near, far, links = pair
    shut_down(links)
    assert (near.recv(1), far.recv(1)) == (b"", b"")


def test_another_file_under_the_same_descriptor_is_left_alone(pair: Pair) -> None:
    near, far, links = pair
    shut_down(dict.fromkeys(links, "socket:[1]"))
    far.sendall(b"2")
    assert near.recv(1) == b"2"


def test_sockets_are_recorded_while_they_are_opened() -> None:
    with socket.socket(), recorded_sockets() as opened:
        inside = socket.socket()
    with inside:
        assert list(opened) == [inside.fileno()]
