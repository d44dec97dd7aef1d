"""KERNEL: the session, which is the Python API: its verbs and what it knows of its engines."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fsdp_magic.core.errors import UsageError
from fsdp_magic.core.placement import Placement
from fsdp_magic.core.protocol import (
    CellOutput,
    EvalRequest,
    ModelRequest,
    Reply,
    RunRequest,
    ShardsRequest,
    StatusRequest,
    TrainRequest,
)
from fsdp_magic.core.specs import EvalSpec, InitSpec, ModelSpec, RunSpec, TrainSpec, parse_ranks
from fsdp_magic.core.telemetry import RankStatus
from fsdp_magic.notebook import display
from fsdp_magic.notebook import variables as variables_of
from fsdp_magic.notebook.engines import Engines
from fsdp_magic.notebook.evaluation import Evaluation
from fsdp_magic.notebook.history import History
from fsdp_magic.notebook.options import looked_up
from fsdp_magic.notebook.outcomes import outputs
from fsdp_magic.notebook.output import Output
from fsdp_magic.notebook.run import Run
from fsdp_magic.notebook.training import train_on
from fsdp_magic.notebook.world import plan_world
from fsdp_magic.panels import mosaic, status


class Session:
    """Engines that run cells, shard models and train them.

    Every verb blocks, and is called from one thread. In a notebook a verb shows its panel unless
    it is called with ``show=False``; elsewhere it logs.

    Attributes:
        plan: the world that was started.
    """

    def __init__(self, spec: InitSpec) -> None:
        self.spec = spec
        self._history = History()
        self.plan = plan_world(spec)
        self._engines: Engines | None = Engines(self.plan)
        _LIVE.add(self)

    # -- life

    def restart(self) -> Session:
        """Replace every engine by a fresh one; variables and models on them are gone."""
        self.shutdown()
        self._history.leave_engines()
        self._engines = Engines(self.plan)
        _LIVE.add(self)
        return self

    def shutdown(self) -> None:
        """End the engines; nothing of them is left. Safe to call twice."""
        _LIVE.discard(self)
        if self._engines is not None:
            self._engines.stop()
            self._engines = None

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()

    def __repr__(self) -> str:
        state = "running" if self.running else "shut down"
        return f"<Session: {self.world_size} {self.plan.device} engines, {state}>"

    def _ipython_display_(self) -> None:
        """Show the ranks where a cell ends in the session, unless the cell has just drawn them."""
        if not self.alive:
            display.write("stdout", f"{self!r}\n")
        elif not display.is_shown(self):
            self.status()

    @property
    def runs(self) -> list[Run]:
        """Every ``Run``, also those that raised."""
        return self._history.runs

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
        return self.plan.n

    @property
    def client(self) -> Any:
        """The ipyparallel client of the engines, for ``%%px`` and the like."""
        return self.engines.cluster.client

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
        spec = RunSpec(**looked_up({"ranks": text, "timeout": timeout}, RunSpec, self.number))
        chosen = tuple(range(self.world_size))
        if spec.ranks is not None:
            chosen = parse_ranks(spec.ranks, world_size=self.world_size)
        replies, output = self.engines.ask(
            "run",
            {rank: RunRequest(code=code, name=name) for rank in chosen},
            write=display.write if show else display.discard,
            timeout=spec.timeout,
        )
        left = outputs(replies, output, result=lambda text: text)
        if show:
            _show_results(left, output)
        return left

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
        replies, output = self.engines.ask(
            "model", self._everywhere(request), write=display.write if show else display.discard
        )
        report = replies[0].report
        if report.starts_anew:
            self._history.start_anew()
        placements: tuple[Placement, ...] = report.placements
        for placement in placements if show else ():
            display.show(mosaic.html(placement), mosaic.text(placement))
        if show:
            _show_results(outputs(replies, output, result=lambda r: r.result), output)
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
        spec = TrainSpec(**looked_up(options, TrainSpec, self.number))
        return self.train_from(spec, code, show=show, name=name)

    def train_from(
        self, spec: TrainSpec, code: str, *, show: bool = True, name: str = "<%%fsdp_train>"
    ) -> Run:
        """Run code as training steps as a spec says; see ``train``."""
        if isinstance(spec.log, str):
            raise UsageError(f"--log {spec.log!r} is not a function of the notebook")
        evaluation = self._history.evaluation_for(spec)
        asked, steps_left = self._history.resumed(spec)
        run = self._history.begin(world_size=self.world_size, accumulate=spec.accumulate)
        request = TrainRequest(
            code=code,
            name=name,
            run_id=run.run_id,
            spec=replace(asked, log=None),
            evaluation=evaluation,
            steps_left=steps_left,
        )
        try:
            train_on(self.engines, self._everywhere(request), run, spec, show=show)
        finally:
            self._history.end(run, asked)
        return run

    def eval(
        self, code: str, *, show: bool = True, name: str = "<%%fsdp_eval>", **options: Any
    ) -> Evaluation:
        """Run code over data without gradients, every sample once.

        Args:
            code: the cell; it binds ``loss``, ``metrics`` or ``collect``.
            show: show the result.
            name: file name in tracebacks.
            **options: fields of ``EvalSpec``.

        Returns:
            Loss, metrics and collected rows.

        Raises:
            CellFailedError: if it raised on a rank.
        """
        spec = EvalSpec(**looked_up(options, EvalSpec, self.number))
        return self.eval_from(spec, code, show=show, name=name)

    def eval_from(
        self, spec: EvalSpec, code: str, *, show: bool = True, name: str = "<%%fsdp_eval>"
    ) -> Evaluation:
        """Run code over data as a spec says; see ``eval``."""
        request = EvalRequest(code=code, name=name, spec=spec)
        replies, _ = self.engines.ask(
            "evaluate",
            self._everywhere(request),
            write=display.write if show else display.discard,
            timeout=spec.timeout,
        )
        self._history.evaluation = request
        evaluation = Evaluation([replies[rank].report for rank in sorted(replies)])
        self._history.last_frame = evaluation.last_frame
        if show:
            evaluation.show()
        return evaluation

    def shards(self, model: str = "", *, show: bool = True) -> Placement:
        """Return where every parameter of a sharded model lives; without a name the only one."""
        replies = self._quietly("shards", self._everywhere(ShardsRequest(model=model)))
        placement: Placement = replies[0].report
        if show:
            display.show(mosaic.html(placement), mosaic.text(placement))
        return placement

    def status(self, *, show: bool = True) -> list[RankStatus]:
        """Return what each rank is and how its memory stands, by rank."""
        replies = self._quietly("status", self._everywhere(StatusRequest()))
        ranks: list[RankStatus] = [replies[rank].report for rank in sorted(replies)]
        if show:
            self.show_status(ranks)
        return ranks

    def show_status(self, ranks: Sequence[RankStatus]) -> None:
        """Show ranks, hosts, devices and memory, and the last panel again."""
        stamp = display.stamp()
        display.show(status.html(ranks, stamp=stamp), status.text(ranks, stamp=stamp))
        display.mark_shown(self)
        if self._history.last_frame is not None:
            display.show(*self._history.last_frame)

    def push(self, **variables: Any) -> None:
        """Bind variables on every rank."""
        variables_of.push(self.engines, variables, world_size=self.world_size)

    def pull(self, expression: str, *, rank: int | str = 0, yes: bool = False) -> Any:
        """Return the value of an expression on a rank, or of all ranks as a list.

        A sharded tensor is gathered by all ranks and comes whole, on the CPU, detached.

        Args:
            expression: Python.
            rank: a rank, or ``"all"``.
            yes: also above 1 GiB.
        """
        return variables_of.pull(
            self.engines, expression, rank=rank, yes=yes, world_size=self.world_size
        )

    def number(self, flag: str, expression: str) -> float:
        """Return the number that an option's value stands for on the engines.

        Raises:
            UsageError: if it is no number there, or not the same one on every rank.
        """
        return variables_of.number(self.engines, flag, expression, world_size=self.world_size)

    def _everywhere(self, request: Any) -> dict[int, Any]:
        return dict.fromkeys(range(self.world_size), request)

    def _quietly(self, verb: str, requests: Mapping[int, Any]) -> dict[int, Reply]:
        """Ask ranks without showing what they print."""
        return self.engines.ask(verb, requests, write=display.discard)[0]


_LIVE: weakref.WeakSet[Session] = weakref.WeakSet()


@atexit.register
def _shut_all_down() -> None:
    for session in list(_LIVE):
        session.shutdown()


def _show_results(outputs: Sequence[CellOutput], output: Output) -> None:
    """Print the results of a cell, equal ones once."""
    ranks_by_result: dict[str, list[int]] = {}
    for item in outputs:
        if item.result is not None:
            ranks_by_result.setdefault(item.result, []).append(item.rank)
    for result, ranks in ranks_by_result.items():
        display.write("stdout", f"{output.label(tuple(ranks))} {result}\n")
