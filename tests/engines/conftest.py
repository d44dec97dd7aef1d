"""Worlds of CPU engines that live through the whole run, because starting one takes seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from clean_engines import FRESH_NAMES, cleaned

from fsdp_magic.core.specs import InitSpec
from fsdp_magic.notebook import output
from fsdp_magic.notebook.session import Session


@pytest.fixture(autouse=True)
def _ranks_may_be_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let what ranks say wait longer for its twin: a busy machine may hold a rank up for long."""
    monkeypatch.setattr(output, "TWIN_SECONDS", 2.0)


@pytest.fixture(scope="session")
def world(kept_sessions: list[Any]) -> Iterator[Callable[[int], Session]]:
    """Return a function: number of ranks -> a kept session, with nothing of earlier tests on it."""
    with _kept(kept_sessions) as worlds:
        yield worlds


@pytest.fixture(scope="session")
def limited(kept_sessions: list[Any]) -> Iterator[Callable[[int], Session]]:
    """Return what ``world`` does; each rank may take 128 MiB."""
    with _kept(kept_sessions, memory_limit="128MiB") as worlds:
        yield worlds


@contextmanager
def _kept(kept_sessions: list[Any], **options: Any) -> Iterator[Callable[[int], Session]]:
    worlds: dict[int, Session] = {}

    def of(n: int) -> Session:
        if n not in worlds:
            worlds[n] = Session(InitSpec(n=n, device="cpu", **options))
            kept_sessions.append(worlds[n])
            worlds[n].run(FRESH_NAMES, show=False)
        return cleaned(worlds[n])

    yield of
    for session in worlds.values():
        session.shutdown()


@pytest.fixture
def session(world: Callable[[int], Session]) -> Session:
    """Two ranks, with nothing of earlier tests on them."""
    return world(2)
