"""KERNEL: the life of a session's engines: started, replaced, shut down, at the latest at exit."""

from __future__ import annotations

import atexit
import itertools
import weakref
from dataclasses import replace
from typing import Any, Self

from fsdp_magic.core.errors import CellInterrupted, FsdpError, UsageError
from fsdp_magic.core.specs import InitSpec
from fsdp_magic.core.units import ranks_named
from fsdp_magic.notebook.engines import Engines
from fsdp_magic.notebook.fork_server import ForkServer, kernel_directory
from fsdp_magic.notebook.history import History
from fsdp_magic.notebook.live import Interruptions
from fsdp_magic.notebook.snapshot_files import SnapshotFiles
from fsdp_magic.notebook.world import plan_world


class Lifetime:
    """The engines of a session, from their start to their end.

    Args:
        spec: which engines to start.
        server: makes them, if it fits; it belongs to the session from here on.

    Attributes:
        world_plan: the world that was started.
        restarted: what the last restart did, where that is more than fresh engines.
    """

    def __init__(self, spec: InitSpec, *, server: ForkServer | None = None) -> None:
        self.spec = spec
        self._history = History()
        self._names = itertools.count(1)
        self.restarted = ""
        self._server = server
        self._engines: Engines | None = None
        self._interruptions = Interruptions()
        self._snapshots: SnapshotFiles | None = None
        try:
            self.world_plan = plan_world(spec)
            kernel_directory()
        except BaseException:
            self.shutdown()  # the server came with the call, and nobody else would end it
            raise
        with self._interruptions:
            self._start()

    def restart(self) -> Self:
        """Replace what has ended or is stuck: engines, the controller; else every engine.

        Those that live keep their variables, but a sharded model has lost shards. On fresh
        engines there are no variables. ``restarted`` says what was done.

        Raises:
            CellInterrupted: if it was interrupted; there are no fresh engines then.
        """
        kernel_directory()  # what cannot be started must not cost the engines that run
        with self._interruptions:
            engines = self._engines
            lost = engines is not None and (engines.broken is not None or bool(engines.lost))
            if not self._replace_lost():
                self._stop_engines()
                self._leave_engines(lost=lost)
                self._start()
        if (lost or self._history.snapshots_wait) and self._history.lost_models:
            done = self.restarted or "every rank has a fresh engine"
            self.restarted = f"{done}; {self._what_to_build()}"
        return self

    def _leave_engines(self, *, lost: bool) -> None:
        """Forget what went with engines, and give the memory of their snapshots back.

        Args:
            lost: whether something had happened to them; then the snapshots of a run wait.
        """
        self._history.leave_engines(lost=lost)
        if self._snapshots is not None and not self._history.snapshots_wait:
            self._snapshots.forget()

    def _what_to_build(self) -> str:
        """Return what a person is told of models that went with engines."""
        names = ", ".join(f"`{name}`" for name in self._history.lost_models)
        step = self._snapshot_step
        if step is None:
            return f"build {names} again in %%fsdp_model"
        return (
            f"building {names} again in %%fsdp_model loads the snapshot of step {step:,}, and "
            "%%fsdp_train --resume goes on from there"
        )

    @property
    def _snapshot_step(self) -> int | None:
        """The step of the snapshot that outlives the engines; None: there is none."""
        if self._snapshots is None or not self._history.outlives_engines:
            return None
        return self._snapshots.newest_step

    def _cost(self) -> str:
        """Return what the end of an engine costs, and what to do about it; nothing: no model."""
        lost = self._history.may_lose
        names = ", ".join(f"`{name}`" for name in lost)
        if not names:
            return ""
        they, it = ("is", "it") if len(lost) == 1 else ("are", "them")
        step = self._snapshot_step
        if step is None:
            return (
                f"{names} {they} lost: build {it} again after %fsdp_restart (%%fsdp_train "
                "--snapshot-every N keeps what survives this)"
            )
        return (
            f"{names} {they} lost, and the snapshot of step {step:,} is safe: %fsdp_restart, then "
            f"the cells that build {it}, then %%fsdp_train --resume"
        )

    def _replace_lost(self) -> bool:
        """Replace what is lost, a controller or engines, and return whether that was enough."""
        self.restarted, engines = "", self._engines
        if engines is None or len(engines.lost) == self.world_size:
            return False
        if engines.broken is not None and not engines.lost:
            return False
        try:
            return self._replace_controller(engines) or self._replace_engines(engines)
        except FsdpError as error:
            why = str(error).partition("\n")[0]
            self.restarted = f"every rank has a fresh engine, because {why}"
            return False

    def _replace_controller(self, engines: Engines) -> bool:
        """Replace the controller if it has ended.

        With an engine too there would be much to hope for: the new controller knows from a file
        which engines there are, and must not give a fresh one the number of another.
        """
        if engines.cluster.controller_death is None:
            return False
        if engines.lost:
            raise FsdpError("the controller had ended, too")
        engines.cluster.replace_controller()
        self.restarted = "there is another controller; every rank kept its variables"
        return True

    def _replace_engines(self, engines: Engines) -> bool:
        if not engines.lost:
            return False
        ranks = engines.replace()
        self._leave_engines(lost=True)
        kept = tuple(rank for rank in range(self.world_size) if rank not in ranks)
        have = "have fresh engines" if len(ranks) > 1 else "has a fresh engine"
        their = "their" if len(kept) > 1 else "its"
        self.restarted = (
            f"{ranks_named(ranks)} {have}, {ranks_named(kept)} kept {their} variables; run the "
            f"cells again that made those of {ranks_named(ranks)}"
        )
        return True

    def shutdown(self) -> None:
        """End the engines; nothing of them is left. Safe to call twice."""
        _LIVE.discard(self)
        with self._interruptions as interruptions:
            self._stop_engines()
            if self._snapshots is not None:
                self._snapshots.close()
                self._snapshots = None
                self._history.forget_snapshots()
            if self._server is not None:
                self._server.stop()
                self._server = None
        if interruptions.count and not interruptions.active:
            raise CellInterrupted("interrupted; the engines were shut down all the same")

    def leave(self) -> ForkServer | None:
        """End the engines, and hand the fork server over to the session that comes next."""
        with self._interruptions as interruptions:
            server, self._server = self._server, None
            self.shutdown()
            if server is not None and interruptions.count:
                server.stop()
        if interruptions.count:
            raise CellInterrupted("interrupted; there are no engines now: type %fsdp_init")
        return server

    def _start(self) -> None:
        """Start engines, from the fork server that is there if it is in order."""
        environment, server = self.world_plan.environment, self._server
        try:
            if server is not None and not (self.world_plan.forked and server.fits(environment)):
                server.stop()
                self._server = None
            if self._server is None and self.world_plan.forked:
                self._server = ForkServer(environment)
            self._snapshots = self._snapshots or SnapshotFiles(self.world_plan.n)
            self._engines = Engines(
                replace(self.world_plan, lost_models=self._history.lost_models),
                self._server,
                self._interruptions,
                self._snapshots,
                cost=self._cost,
            )
        except BaseException:
            self.shutdown()
            raise
        _LIVE.add(self)

    def _stop_engines(self) -> None:
        if self._engines is not None:
            engines, self._engines = self._engines, None
            engines.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()

    def __repr__(self) -> str:
        state = "running" if self.running else "shut down"
        return (
            f"<{type(self).__name__}: {self.world_size} {self.world_plan.device} engines, {state}>"
        )

    @property
    def running(self) -> bool:
        """Whether there are engines."""
        return self._engines is not None

    @property
    def alive(self) -> bool:
        """Whether there are engines and they are in order."""
        return self._engines is not None and self._engines.broken is None

    @property
    def engines(self) -> Engines:
        """The engines.

        Raises:
            UsageError: if they were shut down.
        """
        if self._engines is None:
            raise UsageError("the engines were shut down; type %fsdp_init to start some")
        return self._engines

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.world_plan.n

    @property
    def client(self) -> Any:
        """The ipyparallel client of the engines, for ``%%px`` and the like."""
        return self.engines.cluster.client


_LIVE: weakref.WeakSet[Lifetime] = weakref.WeakSet()


@atexit.register
def _shut_all_down() -> None:
    for session in list(_LIVE):
        session.shutdown()
