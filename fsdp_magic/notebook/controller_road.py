"""KERNEL: ipyparallel's own road to engines, over its controller, and its client.

Engines of this host have a channel, and our verbs take that. An engine of another host is
reached here; and whatever its host, an engine is there for the person's own ``%%px``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import ipyparallel
from ipyparallel.error import RemoteError

from fsdp_magic.core.protocol import CALL_NAME, DIGESTS
from fsdp_magic.notebook.events import Answered, Died, Events, event_of
from fsdp_magic.notebook.launch import LoopThread
from fsdp_magic.notebook.processes import Processes

_CONNECT_SECONDS, _REGISTER_SECONDS = 60.0, 5.0
_OUTPUT_SECONDS = 2.0
_PING_SECONDS = 1.0


class ControllerRoad:
    """Requests over ipyparallel's controller.

    Args:
        client: ipyparallel's.
        loop: calls later.
    """

    def __init__(self, client: Any, loop: LoopThread) -> None:
        self._client = client
        self._loop = loop

    def send(self, engine_id: int, verb: str, request: Any, events: Events) -> None:
        """Ask an engine for a verb."""

        def hook(future: Any) -> None:
            future.iopub_callbacks.append(partial(self._publish, engine_id, events))

        name = self._client._engines.get(engine_id)
        if name is None:
            self._presume_dead(engine_id, events)
            return
        future = self._client.send_apply_request(
            self._client._mux_stream,  # not the bare socket: its stream would miss replies
            ipyparallel.Reference(CALL_NAME),
            args=(verb, request),
            ident=name.encode(),
            message_future_hook=hook,
        )
        future.add_done_callback(partial(self._answer, engine_id, events))

    def _publish(self, engine_id: int, events: Events, message: Mapping[str, Any]) -> None:
        """Turn a message on an engine's publishing channel into an event.

        ipyparallel has kept it too, with all that came before; we are done with that.
        """
        event = event_of(engine_id, message)
        if event is not None:
            events.put(event)
        kept = self._client.metadata.get(message["parent_header"]["msg_id"])
        if kept is not None:
            kept.update(stdout="", stderr="", outputs=[])

    def _answer(self, engine_id: int, events: Events, future: Any) -> None:
        """Pass a reply on once the engine's output is complete.

        It is when the engine says, on the channel of its output, that it is idle. That word can
        be lost where a reply cannot, so it is waited for a moment only.
        """
        passed = threading.Event()

        def pass_on(*_: Any) -> None:
            if not passed.is_set():
                passed.set()
                events.put(Answered(engine_id=engine_id, reply=future.result()))

        reply = future.result()
        with suppress(ValueError):  # a list that nobody else shortens
            self._client.history.remove(future.msg_id)
        if isinstance(reply, RemoteError) and reply.ename == "EngineError":
            self._presume_dead(engine_id, events)
        future.output.add_done_callback(pass_on)
        if not passed.is_set():
            self._loop.later(_OUTPUT_SECONDS, pass_on)

    def _presume_dead(self, engine_id: int, events: Events) -> None:
        """Count an engine as dead that the hub has given up.

        The operating system says within a moment how it ended; if it does not, the process may
        live but cannot be reached any more.
        """
        died = Died(engine_id=engine_id, exit_code=None)
        self._loop.later(_OUTPUT_SECONDS, partial(events.put, died))


class Client:
    """ipyparallel's client, for a person who wants it; connected when first asked for.

    Args:
        processes: the controller's among them.
        directory: its profile.
    """

    def __init__(self, processes: Processes, directory: str) -> None:
        self._processes = processes
        self._directory = directory
        self._client: Any = None

    def get(self, *, living: Collection[int], dead: Iterable[int]) -> Any:
        """Return it.

        Args:
            living: ids of the engines that are there.
            dead: ids of those that have ended.
        """
        if self._client is None:
            info = self._processes.loop.run(self._processes.controller.get_connection_info())
            connect = partial(_connected, info["client"], self._directory, living=living, dead=dead)
            self._client = connect()
            deadline = time.monotonic() + _CONNECT_SECONDS
            while (
                self._processes.has_new_controller
                and not _all_answer(self._client, living)
                and time.monotonic() < deadline  # an engine may be busy with something of its own
            ):
                self._client.close(linger=0)
                self._client = connect()
        return self._client

    @property
    def waits(self) -> bool:
        """Whether a ``%%px`` is under way: the channel would overtake it."""
        return self._client is not None and bool(self._client.outstanding)

    def note_end(self, engine_id: int) -> None:
        """Note that an engine has ended."""
        if self._client is not None:
            _tell_of_end(self._client, engine_id)

    def note_controller_end(self, engine_ids: Iterable[int]) -> None:
        """Note that the controller has ended: no ``%%px`` gets an answer any more."""
        if self._client is not None:
            for engine_id in engine_ids:
                _tell_client(self._client, engine_id)

    def wait_for(self, living: Collection[int]) -> None:
        """Wait until it knows engines, if it is connected."""
        if self._client is not None:
            _wait_for_engines(self._client, living)

    def close(self) -> None:
        """Close it; the next one that is asked for is another."""
        client, self._client = self._client, None
        if client is not None:
            client.close(linger=0)


def _connected(
    info: Mapping[str, Any], directory: str, *, living: Collection[int], dead: Iterable[int]
) -> Any:
    """Return ipyparallel's client, once it knows the engines that live, and only those.

    Args:
        info: how to reach the controller.
        directory: its profile.
        living: ids of the engines that are there.
        dead: ids of those that have ended.
    """
    deadline = time.monotonic() + _CONNECT_SECONDS
    client = _connected_once(info, directory, living)
    while not set(living) <= set(client.ids) and time.monotonic() < deadline:
        client.close(linger=0)  # a notice that comes while it connects is lost to it
        client = _connected_once(info, directory, living)
    ended = set(dead)
    for engine_id in ended:
        _tell_of_end(client, engine_id)
    while ended & set(client.ids) and time.monotonic() < deadline:
        time.sleep(0.005)  # its own thread takes them out; a %%px now would wait for them
    return client


def _all_answer(client: Any, living: Collection[int]) -> bool:
    """Return whether engines answer over a controller that is newer than they are.

    It knows them from a file before they have connected to it, and what it should pass on to one
    that has not is lost without a word.
    """
    pinged = client[sorted(living)].apply_async(int)
    pinged.wait(_PING_SECONDS)
    return bool(pinged.done())


def _connected_once(info: Mapping[str, Any], directory: str, living: Collection[int]) -> Any:
    client = ipyparallel.Client(info, profile_dir=directory, timeout=_CONNECT_SECONDS)
    client.session.digest_history_size = DIGESTS
    _wait_for_engines(client, living)
    return client


def _wait_for_engines(client: Any, living: Collection[int]) -> None:
    """Wait until a client knows engines; a registration completes on a beat of the hub's heart."""
    deadline = time.monotonic() + _REGISTER_SECONDS
    while not set(living) <= set(client.ids) and time.monotonic() < deadline:
        time.sleep(0.01)


def _tell_of_end(client: Any, engine_id: int) -> None:
    """Tell ipyparallel's hub and client that an engine ended, so that no ``%%px`` waits for it.

    A process beside each engine, ipyparallel's nanny, would do this and no more for us. Sockets
    belong to one thread: it is sent in the client's own. The hub's notice to clients is lost to
    one that is just connecting, so this one is told by itself.
    """
    message = client.session.msg("unregistration_request", content={"id": engine_id})
    client._io_loop.add_callback(client.session.send, client._query_stream, message)
    _tell_client(client, engine_id)


def _tell_client(client: Any, engine_id: int) -> None:
    uuid = client._engines.get(engine_id, "")
    told = {"content": {"id": engine_id, "uuid": uuid}}
    client._io_loop.add_callback(client._unregister_engine, told)
