"""KERNEL: the session, which is the Python API: its verbs and what it knows of its engines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fsdp_magic.core.cell_output import CellOutput
from fsdp_magic.core.errors import OutOfMemoryOnRankError, UsageError
from fsdp_magic.core.placement import Placement
from fsdp_magic.core.protocol import EvalRequest, ModelRequest, RunRequest, TrainRequest
from fsdp_magic.core.reply import ModelReport
from fsdp_magic.core.specs import CompareSpec, EvalSpec, ModelSpec, RunSpec, TrainSpec, parse_ranks
from fsdp_magic.notebook import display
from fsdp_magic.notebook import variables as variables_of
from fsdp_magic.notebook.comparing import compare_on
from fsdp_magic.notebook.comparison import Comparison
from fsdp_magic.notebook.evaluation import Evaluation
from fsdp_magic.notebook.help import takes_options
from fsdp_magic.notebook.options import looked_up, spec_of
from fsdp_magic.notebook.outcomes import outputs
from fsdp_magic.notebook.results import show_results
from fsdp_magic.notebook.run import Run
from fsdp_magic.notebook.screen import Nowhere, Page, Screen
from fsdp_magic.notebook.session_tuning import Tuning
from fsdp_magic.notebook.torn_steps import restored_notes
from fsdp_magic.notebook.training import train_on
from fsdp_magic.panels import mosaic


class Session(Tuning):
    """Engines that run cells, shard models and train them.

    Every verb blocks, and is called from one thread. In a notebook a verb shows its panel unless
    it is called with ``show=False``; elsewhere it logs.
    """

    def run(
        self,
        code: str,
        *,
        ranks: str | int | Sequence[int] | None = None,
        timeout: float | None = None,
        show: bool = True,
        name: str = "",
    ) -> list[CellOutput]:
        """Run code on every rank, or on some, as ordinary Python.

        Args:
            code: the cell.
            ranks: such as ``"0,2-3"``, ``[0, 2]`` or ``1``; None: all.
            timeout: seconds after which it is stopped.
            show: print what the ranks print.
            name: file name in tracebacks; each call has one of its own.

        Returns:
            One output per rank that ran.

        Raises:
            CellFailedError: if it raised on a rank; the others were released.
            EngineDiedError: if an engine died.
        """
        listed = (ranks,) if isinstance(ranks, int) else ranks
        text = listed if isinstance(listed, str) or listed is None else ",".join(map(str, listed))
        spec = RunSpec(**looked_up({"ranks": text, "timeout": timeout}, RunSpec, self.number))
        chosen = tuple(range(self.world_size))
        if spec.ranks is not None:
            chosen = parse_ranks(spec.ranks, world_size=self.world_size)
        screen = _screen(show)
        request = RunRequest(code=code, name=name or self._name("fsdp"), ranks=chosen)
        replies, output = self.engines.ask(
            "run", dict.fromkeys(chosen, request), screen=screen, timeout=spec.timeout
        )
        show_results({rank: reply.report for rank, reply in replies.items()}, screen)
        return outputs(replies, output, result=lambda result: result.text)

    @takes_options(ModelSpec, without=("names",))
    def model(
        self,
        code: str,
        names: str | Sequence[str] = (),
        *,
        show: bool = True,
        name: str = "",
        **options: Any,
    ) -> Placement:
        """Run code on every rank, then shard what it built and re-point its optimizers.

        Args:
            code: the cell.
            names: what to shard; none: every module that the cell bound.
            show: show the placement.
            name: file name in tracebacks; each call has one of its own.
            **options: as below; the session's defaults stand for the rest.

        Returns:
            Where every parameter of the (last) model lives.
        """
        chosen = self.spec.completed(options)
        spec = spec_of({"names": names, **chosen}, ModelSpec, call="session.model")
        return self.model_from(spec, code, show=show, name=name)

    def model_from(
        self, spec: ModelSpec, code: str, *, show: bool = True, name: str = ""
    ) -> Placement:
        """Run code and shard what it built, as a spec asks; see ``model``."""
        request = ModelRequest(
            code=code,
            name=name or self._name("fsdp_model"),
            spec=spec,
            restore=self._history.snapshots_wait,
        )
        screen = _screen(show)
        replies, _ = self.engines.ask("model", self._everywhere(request), screen=screen)
        report = replies[0].report
        if report.starts_anew:
            self._note_built(report)
        placements: tuple[Placement, ...] = report.placements
        for placement in placements if show else ():
            display.show(mosaic.html(placement), mosaic.text(placement))
        show_results({rank: reply.report.result for rank, reply in replies.items()}, screen)
        left = self._history.steps_left(report.restored)
        for note in (*report.notes, *restored_notes(report.restored, steps_left=left)):
            screen.write("stdout", f"{note}\n")
        screen.flush()
        return placements[-1]

    def _note_built(self, report: ModelReport) -> None:
        """Note that models were built: anew, or with what lost engines had."""
        self.engines.weights.built(report.restored)
        self._history.built((each.model for each in report.placements), report.restored)

    @takes_options(TrainSpec, without=("output",))
    def train(self, code: str, *, show: bool = True, name: str = "", **options: Any) -> Run:
        """Run code as training steps.

        Args:
            code: the cell; it binds ``loss``, a scalar that requires grad.
            show: show the live panel.
            name: file name in tracebacks; each call has one of its own.
            **options: as below; they mean what they mean for ``%%fsdp_train``.

        Returns:
            The run, with one loss and one gradient norm per step.

        Raises:
            CellFailedError: if it raised on a rank; the step it was in changed no weight.
            KeyboardInterrupt: if it was interrupted; ``.run`` holds what was done.
        """
        spec = spec_of(options, TrainSpec, call="session.train", numbers=self.number)
        return self.train_from(spec, code, show=show, name=name)

    def train_from(self, spec: TrainSpec, code: str, *, show: bool = True, name: str = "") -> Run:
        """Run code as training steps as a spec says; see ``train``."""
        if isinstance(spec.log, str):
            raise UsageError(f"--log {spec.log!r} is not a function of the notebook")
        self.engines.weights.refuse_torn()
        evaluation = self._history.evaluation_for(spec)
        weights = self.engines.weights
        back_at = weights.back_at
        spec, sized = self._history.sized(spec, ranks=self.world_size)
        asked, steps_left = self._history.resumed(spec, back_at=back_at)
        run = self._history.begin(world_size=self.world_size, accumulate=spec.accumulate)
        run.notes += filter(None, (sized, self._history.snapshot_note))
        if asked.snapshot_every is not None:
            self._history.begin_snapshots(run)
        request = TrainRequest(
            code=code,
            name=name or self._name("fsdp_train"),
            run_id=run.run_id,
            spec=replace(asked, log=None),
            evaluation=evaluation,
            steps_left=steps_left,
        )
        try:
            train_on(self.engines, self._everywhere(request), run, spec, show=show)
        except OutOfMemoryOnRankError as error:
            if known := self._history.known_to_fit(spec, run.micro_batch_size):
                error.add_line(known)
            raise
        finally:
            self._history.end(run, asked)
            if run.began:
                self._history.training = self._history.tuning = request
            if run.began and weights.back_at is back_at:
                weights.back_at = None  # they have trained on from there
        return run

    @takes_options(EvalSpec, without=("output",))
    def eval(self, code: str, *, show: bool = True, name: str = "", **options: Any) -> Evaluation:
        """Run code over data without gradients, every sample once.

        Args:
            code: the cell; it binds ``loss``, ``metrics`` or ``collect``.
            show: show the result.
            name: file name in tracebacks; each call has one of its own.
            **options: as below; they mean what they mean for ``%%fsdp_eval``.

        Returns:
            Loss, metrics and collected rows.

        Raises:
            CellFailedError: if it raised on a rank.
        """
        spec = spec_of(options, EvalSpec, call="session.eval", numbers=self.number)
        return self.eval_from(spec, code, show=show, name=name)

    def eval_from(
        self, spec: EvalSpec, code: str, *, show: bool = True, name: str = ""
    ) -> Evaluation:
        """Run code over data as a spec says; see ``eval``."""
        request = EvalRequest(code=code, name=name or self._name("fsdp_eval"), spec=spec)
        replies, _ = self.engines.ask(
            "evaluate",
            self._everywhere(request),
            screen=_screen(show),
            timeout=spec.timeout,
        )
        self._history.evaluation = request
        evaluation = Evaluation([replies[rank].report for rank in sorted(replies)])
        self._history.last_frame = evaluation.last_frame
        if show:
            evaluation.show()
        return evaluation

    @takes_options(CompareSpec)
    def compare(self, *, show: bool = True, **options: Any) -> Comparison:
        """Run the last training cell under several strategies, from the same weights and data.

        Weights, optimizers, schedulers, random states and the place in the data are afterwards as
        before, and the model is spread as before.

        Args:
            show: show the table.
            **options: as below; they mean what they mean for ``%fsdp_compare``.

        Returns:
            Losses, times and memory of each.

        Raises:
            UsageError: if no training cell has run yet.
            CellFailedError: if the cell failed; everything is as before.
        """
        spec = spec_of(options, CompareSpec, call="session.compare", numbers=self.number)
        return self.compare_from(spec, show=show)

    def compare_from(self, spec: CompareSpec, *, show: bool = True) -> Comparison:
        """Compare strategies as a spec asks; see ``compare``."""
        self.engines.weights.refuse_torn()
        request = self._history.training
        if request is None:
            raise UsageError(
                "%fsdp_compare runs the last training cell again, and none has run; run a "
                "%%fsdp_train cell first"
            )
        comparison = compare_on(self.engines, request, spec, world_size=self.world_size, show=show)
        self._history.last_frame = comparison.last_frame
        return comparison

    def push(self, **variables: Any) -> None:
        """Bind variables on every rank."""
        variables_of.push(self.engines, variables, world_size=self.world_size)


def _screen(show: bool) -> Screen:
    return Page() if show else Nowhere()
