"""KERNEL: what a session has run so far, and what a later cell may take up again."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from fsdp_magic.core.errors import UsageError
from fsdp_magic.core.protocol import EvalRequest, TrainRequest
from fsdp_magic.core.recovery import RestoreReport, gone
from fsdp_magic.core.specs import TrainSpec
from fsdp_magic.notebook.found_size import FoundSize
from fsdp_magic.notebook.run import Run


class History:
    """The runs of a session.

    Attributes:
        runs: every ``Run``, also those that raised.
        evaluation: the newest ``%%fsdp_eval`` cell, which ``--eval-every`` runs again.
        training: the newest ``%%fsdp_train`` cell, which ``%fsdp_compare`` runs again.
        tuning: the newest cell of steps, trained or tuned, which ``%fsdp_tune`` tries.
        last_frame: the last panel of the present engines, as HTML and as text.
        snapshots_wait: whether engines that are gone left a snapshot, which the models that are
            built next get.
        lost_models: names of models that went with engines, until they are built again.
    """

    def __init__(self) -> None:
        self.runs: list[Run] = []
        self.evaluation: EvalRequest | None = None
        self.training: TrainRequest | None = None
        self.tuning: TrainRequest | None = None
        self.last_frame: tuple[str, str] | None = None
        self._run_ids = 0
        self._newest: Run | None = None
        self._newest_epochs = 1
        self._asked = TrainSpec()
        self._lost: Run | None = None
        self._snapshots_of: Run | None = None
        self._snapshots_before: Run | None = None
        self._taken_up = self._ran_since = False
        self.snapshots_wait = False
        self._models: tuple[str, ...] = ()
        self.lost_models: tuple[str, ...] = ()
        self._found: FoundSize | None = None

    def use(self, found: FoundSize) -> None:
        """Take a size that was found for data as the default of training cells that read them."""
        self._found = found

    def sized(self, spec: TrainSpec, *, ranks: int) -> tuple[TrainSpec, str]:
        """Return what a run is asked for with the micro-batch size that was found for its data.

        Args:
            spec: as typed.
            ranks: in the world.

        Returns:
            The options, and what to say of them; nothing: the size is as typed.
        """
        if self._found is None or not self._found.is_for(spec):
            return spec, ""
        of_run = self._newest.micro_batch_size if spec.resume and self._newest else None
        if of_run is not None:  # its steps were counted in batches of that size
            note = f"the micro-batch size is {of_run:,}, as in the run that this one finishes"
            return replace(spec, micro_batch_size=of_run), note
        return self._found.sized(spec, ranks=ranks)

    def known_to_fit(self, spec: TrainSpec, micro_batch_size: int | None) -> str:
        """Return what to say of the size of a run that was out of memory; see ``FoundSize``."""
        return "" if self._found is None else self._found.known_to_fit(spec, micro_batch_size)

    def begin(self, *, world_size: int, accumulate: int) -> Run:
        """Return a new run."""
        self._run_ids += 1
        run = Run(run_id=self._run_ids, world_size=world_size, accumulate=accumulate)
        self.runs.append(run)
        return run

    def begin_snapshots(self, run: Run) -> None:
        """Note that a run makes snapshots, once it has begun."""
        self._snapshots_before, self._snapshots_of = self._snapshots_of, run

    def end(self, run: Run, spec: TrainSpec) -> None:
        """Remember a run that is over, however it ended; a trial left nothing to take up."""
        self.last_frame = run.last_frame or self.last_frame
        self._ran_since = self._ran_since or run.began
        if self._snapshots_of is run and not run.began:
            self._snapshots_of = self._snapshots_before
        if run.began and (self._taken_up or spec.snapshot_every is not None):
            # what has not found its place by now is not waited for
            self.snapshots_wait = self._taken_up = False
        if run.began and not spec.trial:
            self._newest, self._newest_epochs = run, spec.epochs or 1
            # one that finishes another has the length of that one
            self._asked = (
                replace(self._asked, snapshot_every=spec.snapshot_every) if spec.resume else spec
            )

    def start_anew(self) -> None:
        """Forget what could be resumed: a new model starts at step 0."""
        self._newest = self._found = None
        self.forget_snapshots()

    def forget_snapshots(self) -> None:
        """Note that there are none any more."""
        self._lost = self._snapshots_of = None
        self._taken_up = self.snapshots_wait = False

    def built(self, names: Iterable[str], restored: RestoreReport | None) -> None:
        """Note that models were built.

        Args:
            names: of the models.
            restored: what they got of a snapshot; None: none was there to get.
        """
        names = tuple(names)
        self._models = tuple(dict.fromkeys((*self._models, *names)))
        self.lost_models = tuple(name for name in self.lost_models if name not in names)
        if restored is not None and restored.step is not None:
            self._take_up()
        elif restored is not None and restored.waits:
            self._newest, self._taken_up = None, False
        else:
            self.start_anew()

    def _take_up(self) -> None:
        """Remember the run of the engines that are gone: its snapshot was put into new models."""
        self._newest, self._taken_up = self._lost, True

    @property
    def snapshot_note(self) -> str:
        """What to say where a run begins though a snapshot waits; nothing: none does."""
        if not self.snapshots_wait or self._taken_up:
            return ""
        return (
            "the snapshot of the engines that are gone was not loaded; a %%fsdp_model cell that "
            "builds the model gets it"
        )

    @property
    def may_lose(self) -> tuple[str, ...]:
        """Names of the models that are there, which the end of an engine costs."""
        return self._models

    @property
    def outlives_engines(self) -> bool:
        """Whether a snapshot is worth keeping when engines are lost: its run has not ended."""
        return self._snapshots_of is not None and self._snapshots_of.state != "done"

    def leave_engines(self, *, lost: bool) -> None:
        """Forget what was on engines that are gone; the runs stay.

        Args:
            lost: whether something had happened to engines; then a snapshot waits of a run that
                had not ended. One that waits already goes on waiting if nothing ran since.
        """
        self._lost = self._newest or self._lost
        waits_on = self.snapshots_wait and not self._ran_since
        self.snapshots_wait = (lost or waits_on) and self.outlives_engines
        self._taken_up = self._ran_since = False
        if not self.snapshots_wait:
            self.forget_snapshots()
        self.lost_models = tuple(dict.fromkeys((*self.lost_models, *self._models)))
        self._models = ()
        self._newest = self.evaluation = self.training = self.tuning = None
        self.last_frame = self._found = None

    def evaluation_for(self, spec: TrainSpec) -> EvalRequest | None:
        """Return what ``--eval-every`` runs; None: nothing, or the training cell itself.

        Raises:
            UsageError: if nothing is known to evaluate.
        """
        if spec.eval_every is None or spec.eval_data is not None:
            return None
        if self.evaluation is None:
            raise UsageError(
                "--eval-every needs to know what to evaluate; add --eval-data NAME for this cell "
                "on those data, or run a %%fsdp_eval cell first"
            )
        return self.evaluation

    def resumed(
        self, spec: TrainSpec, *, back_at: RestoreReport | None = None
    ) -> tuple[TrainSpec, int | None]:
        """Return what a run is asked for, and how many steps an interrupted one had left.

        Those are None unless ``--resume`` was asked for and their number is known.

        Args:
            spec: as typed.
            back_at: the snapshot that the ranks were put back to; None: to none.

        Raises:
            UsageError: if there is nothing to resume.
        """
        if not spec.resume:
            return spec, None
        run = self._newest
        if run is None and self.lost_models:
            raise self._gone()
        ended_early = run is not None and (back_at or run.state in ("stopped", "failed"))
        if run is None or not ended_early:
            why = "the last one took all its steps" if run else "none has begun with this model"
            raise _nothing_to_resume(why)
        if spec.snapshot_every is None:
            spec = replace(spec, snapshot_every=self._asked.snapshot_every)
        if run.total_steps is None:  # data of unknown length: its epochs are counted instead
            ended = run.epochs_ended
            if back_at is not None and back_at.run_id == run.run_id:
                ended = back_at.epochs_ended
            epochs = max(1, self._newest_epochs - ended)
            return replace(spec, steps=None, epochs=epochs if spec.data else None), None
        left = self.steps_left(back_at) or 0
        if left < 1:
            raise _nothing_to_resume("the last one took all its steps")
        self._refuse_another_length(spec, left)
        return spec, left

    def steps_left(self, back_at: RestoreReport | None) -> int | None:
        """Return how many steps the newest run has left; None: nobody knows, or none began.

        Args:
            back_at: the snapshot that the ranks are back at; None: at none.
        """
        run = self._newest
        if run is None or run.total_steps is None:
            return None
        if back_at is not None and back_at.step is not None:
            return run.first_step + run.total_steps - back_at.step
        return run.total_steps - run.steps

    def _gone(self) -> UsageError:
        line = gone(self.lost_models, has_snapshot=self.snapshots_wait)
        if not self.snapshots_wait:
            line += ", and leave --resume out: there is no snapshot"
        return UsageError(line)

    def _refuse_another_length(self, spec: TrainSpec, left: int) -> None:
        """Raise if a length is given that is not that of the run that is to be finished."""
        for flag, given, asked in (
            ("--steps", spec.steps, self._asked.steps),
            ("--epochs", spec.epochs, self._asked.epochs),
        ):
            if given is not None and given != asked:
                raise UsageError(
                    f"--resume takes the {left:,} steps that the last run had left, and {flag} "
                    f"{given} says another length; leave one of the two out"
                )


def _nothing_to_resume(why: str) -> UsageError:
    return UsageError(f"--resume finishes a run that ended early, and {why}; leave --resume out")
