"""KERNEL: which session is running: started once, found again, replaced when asked."""

from __future__ import annotations

from typing import Any

from fsdp_magic.core.errors import CellInterrupted, UsageError
from fsdp_magic.core.specs import InitSpec
from fsdp_magic.notebook import display
from fsdp_magic.notebook.fork_server import kernel_directory
from fsdp_magic.notebook.help import takes_options
from fsdp_magic.notebook.live import Interruptions
from fsdp_magic.notebook.options import spec_of
from fsdp_magic.notebook.session import Session
from fsdp_magic.notebook.world import plan_world

_CURRENT: list[Session] = []


@takes_options(InitSpec)
def init(*, show: bool = True, **options: Any) -> Session:
    """Start engines, or return the running session if it is the one asked for.

    Args:
        show: show ranks, hosts and devices.
        **options: as below; they mean what they mean for ``%fsdp_init``.

    Raises:
        UsageError: if an option cannot work, or another session is running.
        FsdpError: if the engines did not start; nothing is left behind.
    """
    return init_from(spec_of(options, InitSpec, call="fsdp_magic.init"), show=show)


def init_from(spec: InitSpec, *, show: bool = True) -> Session:
    """Start engines as a spec says; see ``init``."""
    session = current()
    if session is not None and session.alive and not spec.restart:
        if spec != InitSpec() and plan_world(spec) != session.world_plan:
            raise UsageError(
                f"a session with {session.world_size} {session.world_plan.device} engines is "
                "running; add --restart to replace it, or leave the options out to keep it"
            )
        if show:
            session.status()
            display.write("stdout", "This session was running already; --restart replaces it.\n")
        return session
    plan_world(spec)  # what cannot be started must not cost the session that runs
    kernel_directory()
    with Interruptions() as held:  # no session may be running that nobody knows of
        session = Session(spec, server=None if session is None else session.leave())
        _CURRENT[:] = [session]
    if held.count:
        raise CellInterrupted("interrupted; the engines are running")
    if show:
        session.status()
    return session


def current() -> Session | None:
    """Return the session that ``init`` started last, if its engines are there."""
    return _CURRENT[0] if _CURRENT and _CURRENT[0].running else None


def restartable() -> Session | None:
    """Return the session that is running; else the last that was, whose engines have ended."""
    return current() or (_CURRENT[0] if _CURRENT else None)
