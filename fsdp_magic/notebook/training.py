"""KERNEL: a training run followed: its live panel, twice a second, and its log."""

from __future__ import annotations

import ast
import math
import time
from collections.abc import Mapping

from fsdp_magic.core.errors import CellInterrupted, FsdpError
from fsdp_magic.core.protocol import TrainRequest
from fsdp_magic.core.specs import TrainSpec
from fsdp_magic.notebook import display
from fsdp_magic.notebook.engines import Engines
from fsdp_magic.notebook.run import Run
from fsdp_magic.notebook.screen import Nowhere, Page
from fsdp_magic.notebook.step_log import StepLog
from fsdp_magic.panels import training
from fsdp_magic.panels.loss_history import LossHistory
from fsdp_magic.panels.training_view import RankView, TrainingView

_FRAME_SECONDS = 0.5
_RECENT_SECONDS = 5.0


def train_on(
    engines: Engines,
    requests: Mapping[int, TrainRequest],
    run: Run,
    spec: TrainSpec,
    *,
    show: bool,
) -> None:
    """Ask ranks to train, and show and log the run while it goes on.

    Args:
        engines: to ask.
        requests: by rank.
        run: takes what the ranks report; it is done, stopped or failed afterwards.
        spec: the options it was started with.
        show: show the live panel and what the ranks print.
    """
    assert not isinstance(spec.log, str)
    binds_metrics = any(map(_binds_metrics, {request.code for request in requests.values()}))
    panel = TrainingPanel(run, spec, show=show, binds_metrics=binds_metrics)
    log = StepLog(run, spec.log)

    def tick() -> None:
        log.tick()
        panel.tick()

    screen = Page() if show else Nowhere()
    try:
        engines.ask("train", requests, screen=screen, timeout=spec.timeout, run=run, on_tick=tick)
    except BaseException as error:
        if isinstance(error, (FsdpError, CellInterrupted)):
            error.run = run
        run.fail(error, spec)
        raise
    finally:
        log.tick()
        panel.finish()


class TrainingPanel:
    """Draws a run while it goes on, and its last frame.

    Args:
        run: what to draw.
        spec: the options it was started with.
        show: whether to draw at all.
        binds_metrics: whether the cell names metrics, so that their place is kept from the start.
    """

    def __init__(
        self, run: Run, spec: TrainSpec, *, show: bool, binds_metrics: bool = False
    ) -> None:
        self._run = run
        self._spec = spec
        self._show = show
        self._binds_metrics = binds_metrics
        self._losses = LossHistory()
        self._panel = display.Panel()
        self._drawn_at = time.monotonic()
        self._is_drawn = False
        self._marks: list[tuple[float, int]] = []

    def tick(self) -> None:
        """Draw a frame if half a second has passed since the last one."""
        now = time.monotonic()
        if self._show and now - self._drawn_at >= _FRAME_SECONDS:
            self._drawn_at, self._is_drawn = now, True
            self._panel.draw(*self._frame(), final=False)

    def finish(self) -> None:
        """Draw the last frame, which stays in the saved notebook and with the run.

        A run that was refused at once has nothing to show but its error.
        """
        if self._run.state == "failed" and not self._run.steps and not self._is_drawn:
            return
        self._losses = LossHistory()  # anew, from the last reports, which hold all
        self._run.last_frame = self._frame()
        if self._show:
            self._panel.draw(*self._run.last_frame, final=True)
            display.mark_shown(self._run)

    def _frame(self) -> tuple[str, str]:
        view = self.view()
        return training.html(view), training.text(view)

    def view(self) -> TrainingView:
        """Return what the panel shows at this moment."""
        run, seconds = self._run, self._run.seconds
        steps = run.steps
        self._losses.extend(run.losses_from(self._losses.count))
        norm = run.ranks[0].grad_norms[steps - 1] if steps else None
        rate = self._steps_per_second(seconds, steps)
        left = None if run.total_steps is None else run.total_steps - steps
        return TrainingView(
            state=run.state,
            steps=steps,
            total_steps=run.total_steps or self._spec.steps,
            first_step=run.first_step,
            micro_batch_size=run.micro_batch_size,
            accumulate=run.accumulate,
            data_parallel_size=run.world_size,
            samples_per_step=run.samples_per_step,
            losses=self._losses,
            grad_norm=None if norm is None or math.isnan(norm) else norm,
            learning_rate=run.learning_rate,
            samples_per_second=run.samples_per_second,
            tokens_per_second=run.tokens_per_second,
            seconds=seconds,
            eta_seconds=left / rate if left is not None and rate else None,
            ranks=tuple(
                RankView(
                    rank=number,
                    device_name=rank.device_name,
                    memory=rank.memory,
                    peak_memory=rank.peak_memory,
                    activity=rank.activity,
                    mean_activity=rank.mean_activity,
                )
                for number, rank in enumerate(run.ranks)
            ),
            stamp=display.stamp(),
            waited=run.waited,
            waiting=run.waiting if run.state in ("starting", "running") else None,
            message=run.message,
            is_stopping=run.is_stopping,
            binds_metrics=self._binds_metrics,
            metrics=run.newest_metrics,
            evaluates=self._spec.eval_every is not None,
            evaluation=run.evaluations[-1] if run.evaluations else None,
            notes=(*run.notes, *_non_finite(run), *_skipped(run)),
        )

    def _steps_per_second(self, seconds: float, steps: int) -> float | None:
        """Return the rate of the last few seconds, which the first slow steps do not bend."""
        self._marks.append((seconds, steps))
        while len(self._marks) > 2 and seconds - self._marks[1][0] > _RECENT_SECONDS:
            self._marks.pop(0)
        since, before = self._marks[0]
        return (steps - before) / (seconds - since) if seconds > since else None


def _binds_metrics(code: str) -> bool:
    """Return whether a cell assigns to ``metrics``; only a guess, for the room in the panel."""
    try:
        tree = ast.parse(code)
    except SyntaxError:  # a cell with ! in it, or a wrong one, which the engines will tell
        return False
    return any(
        isinstance(node, ast.Name) and node.id == "metrics" and isinstance(node.ctx, ast.Store)
        for node in ast.walk(tree)
    )


def _non_finite(run: Run) -> list[str]:
    """Return a sentence about losses that are not finite, if there are any."""
    steps = run.non_finite_steps
    if not steps:
        return []
    more = f", and of {len(steps) - 1:,} or more after it" if len(steps) > 1 else ""
    return [f"the loss of step {steps[0]:,} is not finite{more}; --nan stop ends a run there"]


def _skipped(run: Run) -> list[str]:
    """Return a sentence about steps that the fp16 scaler skipped, if there are any."""
    if run.skipped is None:
        return []
    count = run.skipped.count
    steps = "1 step was" if count == 1 else f"{count:,} steps were"
    sentence = (
        f"{steps} skipped by the fp16 scaler, whose gradients were not finite; the scale was "
        f"{run.skipped.scale:,.12g} after that"
    )
    if run.skipped.scale < 1:
        sentence += ": no scale helps, so look for what is not finite, or take --precision bf16"
    return [sentence]
