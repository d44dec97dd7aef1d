"""KERNEL: the session, which is the Python API: its verbs and what it knows of its engines."""

from __future__ import annotations

import atexit
import pickle
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from fsdp_magic.core.errors import (
    CellFailedError,
    CellInterrupted,
    EngineDiedError,
    FsdpError,
    OutOfMemoryOnRankError,
    UsageError,
)
from fsdp_magic.core.page import Page
from fsdp_magic.core.placement import Placement
from fsdp_magic.core.protocol import (
    CellOutput,
    Failure,
    HelloReport,
    HelloRequest,
    ModelRequest,
    PullRequest,
    PushRequest,
    RankStatus,
    RecoverRequest,
    Reply,
    RunRequest,
    ShardsRequest,
    StatusRequest,
    TrainRequest,
)
from fsdp_magic.core.specs import InitSpec, ModelSpec, RunSpec, TrainSpec, parse_ranks
from fsdp_magic.core.units import GIB, ranks_text
from fsdp_magic.notebook import display
from fsdp_magic.notebook.cluster import Cluster
from fsdp_magic.notebook.live import Follower, Interruptions, Outcome
from fsdp_magic.notebook.output import Output
from fsdp_magic.notebook.run import Run
from fsdp_magic.notebook.training import TrainingPanel
from fsdp_magic.notebook.world import WorldPlan, plan_world
from fsdp_magic.panels import errors as error_panel
from fsdp_magic.panels import mosaic, status

PULL_LIMIT_BYTES = GIB
_QUICK_SECONDS = 30.0


class Session:
    """Engines that run cells, shard models and train them.

    Every verb blocks, and is called from one thread. In a notebook a verb shows its panel unless
    it is called with ``show=False``; elsewhere it logs.

    Attributes:
        runs: every ``Run``, also those that raised.
    """

    def __init__(self, spec: InitSpec) -> None:
        self.spec = spec
        self.runs: list[Run] = []
        self._plan = plan_world(spec)
        self._cluster: Cluster | None = None
        self._ranks: dict[int, int] = {}
        self._generation = 1
        self._broken: FsdpError | None = None
        self._run_ids = 0
        self._interruptions = Interruptions()
        self._start()

    # -- life

    def _start(self) -> None:
        self._generation, self._broken = 1, None
        self._cluster = Cluster(self._plan.n, environment=self._plan.environment)
        try:
            self._cluster.start()
            self._join()
        except BaseException:
            self.shutdown()
            raise
        _LIVE.add(self)

    def _join(self) -> None:
        """Give every engine its rank, and let them meet."""
        cluster = self._need_cluster()
        ids = dict.fromkeys(cluster.engine_ids, 0)
        self._ranks = {engine_id: place for place, engine_id in enumerate(ids)}
        hellos: dict[int, HelloReport] = {
            engine_id: self._quick("hello", {engine_id: HelloRequest()})[0].report
            for engine_id in ids
        }
        order = sorted(ids, key=lambda i: (hellos[i].host, hellos[i].local_order))
        self._ranks = {engine_id: rank for rank, engine_id in enumerate(order)}
        cluster.watch({engine_id: hello.pid for engine_id, hello in hellos.items()})
        requests = {
            engine_id: self._plan.join_request(rank, directory=cluster.directory)
            for engine_id, rank in self._ranks.items()
        }
        self._quick("join", requests)

    def restart(self) -> Session:
        """Replace every engine by a fresh one; variables and models on them are gone."""
        self.shutdown()
        self._start()
        return self

    def shutdown(self) -> None:
        """End the engines; nothing of them is left. Safe to call twice."""
        _LIVE.discard(self)
        if self._cluster is not None:
            self._cluster.stop()
            self._cluster = None

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()

    def __repr__(self) -> str:
        state = "shut down" if self._cluster is None else "running"
        return f"<Session: {self.world_size} {self._plan.device} engines, {state}>"

    @property
    def alive(self) -> bool:
        """Whether the engines are there and in order."""
        return self._cluster is not None and self._broken is None

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._plan.n

    @property
    def client(self) -> Any:
        """The ipyparallel client of the engines, for ``%%px`` and the like."""
        return self._need_cluster().client

    # -- verbs

    def run(
        self,
        code: str,
        *,
        ranks: str | Sequence[int] | None = None,
        timeout: float | None = None,
        show: bool = True,
        name: str = "<%%fsdp>",
    ) -> list[CellOutput]:
        """Run code on every rank, or on some, as ordinary Python.

        Args:
            code: the cell.
            ranks: such as ``"0,2-3"`` or ``[0, 2]``; None: all.
            timeout: seconds after which it is stopped.
            show: print what the ranks print.
            name: file name in tracebacks.

        Returns:
            One output per rank that ran.

        Raises:
            CellFailedError: if it raised on a rank; the others were released.
            EngineDiedError: if an engine died.
        """
        text = ranks if isinstance(ranks, str) or ranks is None else ",".join(map(str, ranks))
        spec = RunSpec(ranks=text, timeout=timeout)
        chosen = tuple(range(self.world_size))
        if spec.ranks is not None:
            chosen = parse_ranks(spec.ranks, world_size=self.world_size)
        replies, output = self._ask(
            "run",
            {rank: RunRequest(code=code, name=name) for rank in chosen},
            show=show,
            timeout=spec.timeout,
        )
        outputs = _outputs(replies, output)
        if show:
            _show_results(outputs, output)
        return outputs

    def model(
        self,
        code: str,
        names: str | Sequence[str] = (),
        *,
        show: bool = True,
        name: str = "<%%fsdp_model>",
        **options: Any,
    ) -> Placement:
        """Run code on every rank, then shard what it built and re-point its optimizers.

        Args:
            code: the cell.
            names: what to shard; none: every module that the cell bound.
            show: show the placement.
            name: file name in tracebacks.
            **options: fields of ``ModelSpec``; the session's defaults stand for the rest.

        Returns:
            Where every parameter of the (last) model lives.
        """
        chosen = {"strategy": self.spec.strategy, **options}
        spec = ModelSpec(names=names, **chosen)  # type: ignore[arg-type]  # it takes both
        request = ModelRequest(code=code, name=name, spec=spec)
        replies, output = self._ask("model", self._everywhere(request), show=show)
        report = replies[0].report
        placements: tuple[Placement, ...] = report.placements
        for placement in placements if show else ():
            display.show(mosaic.html(placement), mosaic.text(placement))
        if show:
            _show_results(_outputs(replies, output, key="result"), output)
            for note in report.notes:
                display.write("stdout", f"{note}\n")
        return placements[-1]

    def train(
        self, code: str, *, show: bool = True, name: str = "<%%fsdp_train>", **options: Any
    ) -> Run:
        """Run code as training steps.

        Args:
            code: the cell; it binds ``loss``, a scalar that requires grad.
            show: show the live panel.
            name: file name in tracebacks.
            **options: fields of ``TrainSpec``.

        Returns:
            The run, with one loss and one gradient norm per step.

        Raises:
            CellFailedError: if it raised on a rank; the step it was in changed no weight.
            KeyboardInterrupt: if it was interrupted; ``.run`` holds what was done.
        """
        return self.train_from(TrainSpec(**options), code, show=show, name=name)

    def train_from(
        self, spec: TrainSpec, code: str, *, show: bool = True, name: str = "<%%fsdp_train>"
    ) -> Run:
        """Run code as training steps as a spec says; see ``train``."""
        self._run_ids += 1
        run = Run(run_id=self._run_ids, world_size=self.world_size, accumulate=spec.accumulate)
        self.runs.append(run)
        panel = TrainingPanel(run, spec, show=show)
        request = TrainRequest(code=code, name=name, run_id=run.run_id, spec=spec)
        try:
            self._ask(
                "train",
                self._everywhere(request),
                show=show,
                run=run,
                panel=panel,
            )
        except BaseException as error:
            if isinstance(error, (FsdpError, CellInterrupted)):
                error.run = run
            run.fail(error)
            raise
        finally:
            panel.finish()
        return run

    def shards(self, model: str = "", *, show: bool = True) -> Placement:
        """Return where every parameter of a sharded model lives; without a name the only one."""
        replies, _ = self._ask("shards", self._everywhere(ShardsRequest(model=model)), show=False)
        placement: Placement = replies[0].report
        if show:
            display.show(mosaic.html(placement), mosaic.text(placement))
        return placement

    def status(self, *, show: bool = True) -> list[RankStatus]:
        """Return what each rank is and how its memory stands, by rank."""
        replies, _ = self._ask("status", self._everywhere(StatusRequest()), show=False)
        ranks: list[RankStatus] = [replies[rank].report for rank in sorted(replies)]
        if show:
            self.show_status(ranks)
        return ranks

    def show_status(self, ranks: Sequence[RankStatus]) -> None:
        """Show ranks, hosts, devices and memory, and the last training panel again."""
        stamp = display.stamp()
        display.show(status.html(ranks, stamp=stamp), status.text(ranks, stamp=stamp))

    def push(self, **variables: Any) -> None:
        """Bind variables on every rank."""
        sent = {}
        for name, value in variables.items():
            try:
                sent[name] = pickle.dumps(value)
            except Exception as error:  # whatever an object's own pickling raises
                raise UsageError(
                    f"{name} cannot be sent to the engines ({error}); make it there, "
                    "in a %%fsdp cell"
                ) from None
        self._ask("push", self._everywhere(PushRequest(variables=sent)), show=False)

    def pull(self, expression: str, *, rank: int | str = 0, yes: bool = False) -> Any:
        """Return the value of an expression on a rank, or of all ranks as a list.

        A sharded tensor is gathered by all ranks and comes whole, on the CPU, detached.

        Args:
            expression: Python.
            rank: a rank, or ``"all"``.
            yes: also above 1 GiB.
        """
        if rank != "all" and int(rank) not in range(self.world_size):
            raise UsageError(
                f"--rank {rank} does not exist; this world has ranks 0 to {self.world_size - 1}"
            )
        limit = None if yes else PULL_LIMIT_BYTES
        requests = {
            r: PullRequest(
                expression=expression, wanted=rank == "all" or r == int(rank), limit_bytes=limit
            )
            for r in range(self.world_size)
        }
        replies, _ = self._ask("pull", requests, show=False)
        sent = [replies[r].report for r in sorted(replies) if replies[r].report]
        try:
            values = [pickle.loads(value) for value in sent]
        except Exception as error:  # whatever an object's own unpickling raises
            raise UsageError(
                f"{expression} cannot be read in the notebook ({error}); pull a part of it, or "
                f"its text: repr({expression})"
            ) from None
        return values if rank == "all" else values[0]

    # -- asking

    def _everywhere(self, request: Any) -> dict[int, Any]:
        return dict.fromkeys(range(self.world_size), request)

    def _ask(
        self,
        verb: str,
        requests: Mapping[int, Any],
        *,
        show: bool,
        timeout: float | None = None,
        run: Run | None = None,
        panel: TrainingPanel | None = None,
    ) -> tuple[dict[int, Reply], Output]:
        """Send a request to ranks, follow it, and turn failures into exceptions."""
        cluster = self._need_cluster()
        if self._broken is not None:
            raise self._broken
        engines = {rank: engine_id for engine_id, rank in self._ranks.items()}
        asked = {engines[rank]: request for rank, request in requests.items()}
        self._check_dead(tuple(self._ranks[engine_id] for engine_id in cluster.dead))
        output = Output(sorted(requests), write=display.write if show else _drop)
        with self._interruptions:  # from before it is sent until the ranks are in order again
            outcome = Follower(
                ranks={engine_id: self._ranks[engine_id] for engine_id in asked},
                events=cluster.send(verb, asked),
                output=output,
                interruptions=self._interruptions,
                escalation=_Escalation(self, list(asked), run),
                on_progress=None if run is None else run.add,
                on_tick=None if panel is None else panel.tick,
                timeout=timeout,
            ).follow()
            if run is not None:
                run.finish([reply.report for reply in outcome.replies.values() if reply.report])
            self._settle(outcome, output, timeout)
        if self._interruptions.count:
            raise CellInterrupted("interrupted")
        return outcome.replies, output

    def _settle(self, outcome: Outcome, output: Output, timeout: float | None) -> None:
        """Bring the ranks back into order after a failure, and raise what happened."""
        self._check_dead(outcome.dead)
        if outcome.stuck:
            self._broken = FsdpError(
                f"rank {ranks_text(outcome.stuck)} did not come out of the cell within 5 s; "
                "type %fsdp_restart for fresh engines"
            )
            raise self._broken
        if outcome.failed or self._cluster_page.released_generation >= self._generation:
            self._recover()
        if outcome.failed and not self._interruptions.count:
            raise _failure(outcome.replies, output, timeout if outcome.timed_out else None)

    def _check_dead(self, ranks: tuple[int, ...]) -> None:
        """Raise if the engine of a rank died; the session is broken then."""
        if ranks:
            rank = ranks[0]
            engine_id = next(e for e, r in self._ranks.items() if r == rank)
            self._broken = self._need_cluster().died(engine_id, rank=rank)
            raise self._broken

    def _recover(self) -> None:
        """Replace the transports of every rank."""
        self._generation += 1
        request = RecoverRequest(generation=self._generation)
        try:
            self._quick("recover", dict.fromkeys(self._ranks, request))
        except EngineDiedError:
            raise
        except FsdpError as error:
            self._broken = FsdpError(f"{error}; type %fsdp_restart for fresh engines")
            raise self._broken from None

    def _quick(self, verb: str, requests: Mapping[int, Any]) -> list[Reply]:
        """Ask engines for something short that runs none of the person's code."""
        ranks = {engine_id: self._ranks[engine_id] for engine_id in requests}
        with self._interruptions:
            outcome = Follower(
                ranks=ranks,
                events=self._need_cluster().send(verb, requests),
                output=Output(list(ranks.values()), write=_drop),
                interruptions=self._interruptions,
                escalation=_Patience(),
                timeout=_QUICK_SECONDS,
            ).follow()
        self._check_dead(outcome.dead)
        for reply in outcome.replies.values():
            if reply.failure is not None:
                failure = reply.failure
                raise FsdpError(f"{verb} failed: {failure.exception_type}: {failure.message}")
        if outcome.failed:
            raise FsdpError(f"{verb} did not end on every engine within {_QUICK_SECONDS:.0f} s")
        return [outcome.replies[ranks[engine_id]] for engine_id in requests]

    def _need_cluster(self) -> Cluster:
        if self._cluster is None:
            raise UsageError("the engines were shut down; type %fsdp_init to start some")
        return self._cluster

    # -- escalation

    def _release(self) -> None:
        """Free every rank that waits for another."""
        self._cluster_page.release(self._generation)

    @property
    def _cluster_page(self) -> Page:
        return self._need_cluster().page


class _Escalation:
    """An interrupted cell: SIGINT, then broken transports. A run: a clean stop first."""

    def __init__(self, session: Session, engine_ids: list[int], run: Run | None) -> None:
        self._session = session
        self._engine_ids = engine_ids
        self._run = run

    def ask(self) -> float:
        cluster = self._session._need_cluster()
        if self._run is not None:
            cluster.page.stop(self._run.run_id)
            return float("inf")
        cluster.interrupt(self._engine_ids)
        return 1.0

    def force(self) -> None:
        self._session._need_cluster().interrupt(self._engine_ids)
        self._session._release()


class _Patience:
    """A short request of our own is not interrupted; it ends by itself."""

    def ask(self) -> float:
        return float("inf")

    def force(self) -> None:
        return


_LIVE: weakref.WeakSet[Session] = weakref.WeakSet()


@atexit.register
def _shut_all_down() -> None:
    for session in list(_LIVE):
        session.shutdown()


def init(*, show: bool = True, **options: Any) -> Session:
    """Start engines, or return the running session if it is the one asked for.

    Args:
        show: show ranks, hosts and devices.
        **options: fields of ``InitSpec``: n, device, share_gpus, memory_limit, seed, restart,
            strategy.

    Raises:
        UsageError: if an option cannot work, or another session is running.
        FsdpError: if the engines did not start; nothing is left behind.
    """
    return init_from(InitSpec(**options), show=show)


def init_from(spec: InitSpec, *, show: bool = True) -> Session:
    """Start engines as a spec says; see ``init``."""
    session = current()
    if session is not None and session.alive and not spec.restart:
        plan: WorldPlan = plan_world(spec)
        if plan != session._plan:
            raise UsageError(
                f"a session with {session.world_size} {session._plan.device} engines is "
                "running; add --restart to replace it, or leave the options out to keep it"
            )
        if show:
            session.status()
            display.write("stdout", "This session was running already; --restart replaces it.\n")
        return session
    if session is not None:
        session.shutdown()
    session = Session(spec)
    _CURRENT[:] = [session]
    if show:
        session.status()
    return session


def current() -> Session | None:
    """Return the session that ``init`` started last, if its engines are there."""
    return _CURRENT[0] if _CURRENT and _CURRENT[0]._cluster is not None else None


_CURRENT: list[Session] = []


def _drop(stream: str, text: str) -> None:
    return


def _outputs(
    replies: Mapping[int, Reply], output: Output, *, key: str | None = None
) -> list[CellOutput]:
    return [
        CellOutput(
            rank=rank,
            stdout=output.collected(rank, "stdout"),
            stderr=output.collected(rank, "stderr"),
            result=reply.report if key is None else getattr(reply.report, key),
        )
        for rank, reply in sorted(replies.items())
    ]


def _show_results(outputs: Sequence[CellOutput], output: Output) -> None:
    """Print the results of a cell, equal ones once."""
    ranks_by_result: dict[str, list[int]] = {}
    for item in outputs:
        if item.result is not None:
            ranks_by_result.setdefault(item.result, []).append(item.rank)
    for result, ranks in ranks_by_result.items():
        display.write("stdout", f"{output.label(tuple(ranks))} {result}\n")


def _failure(
    replies: Mapping[int, Reply], output: Output, timeout: float | None
) -> CellFailedError:
    """Return the exception that tells why a cell failed."""
    failures = {r: reply.failure for r, reply in replies.items() if reply.failure is not None}
    own = {r: f for r, f in failures.items() if f.kind != "released"} or failures
    released = tuple(sorted(set(failures) - set(own)))
    text = _refusal(own, everywhere=len(own) == len(replies)) or error_panel.text(
        own, released=released
    )
    if timeout is not None:
        text = f"the cell was stopped after {timeout:g} s (--timeout)\n{text}"
    outputs = [
        CellOutput(
            rank=rank,
            stdout=output.collected(rank, "stdout"),
            stderr=output.collected(rank, "stderr"),
        )
        for rank in sorted(replies)
    ]
    full = any(failure.kind == "out_of_memory" for failure in own.values())
    kind = OutOfMemoryOnRankError if full else CellFailedError
    return kind(text, exceptions=own, outputs=outputs)


def _refusal(failures: Mapping[int, Failure], *, everywhere: bool) -> str:
    """Return one line if we refused the same thing on every rank that failed, else nothing."""
    messages = {failure.message for failure in failures.values()}
    if len(messages) > 1 or any(failure.kind != "usage" for failure in failures.values()):
        return ""
    ranks = "" if everywhere else f"rank {ranks_text(tuple(failures))}: "
    return ranks + messages.pop()
