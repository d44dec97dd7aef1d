"""KERNEL: ``session.tune``: the micro-batch size of a training cell, found by running it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from fsdp_magic.core.errors import CellFailedError, UsageError
from fsdp_magic.core.planning.requests import BuiltReport, BuiltRequest
from fsdp_magic.core.protocol import TrainRequest
from fsdp_magic.core.search import Predicted
from fsdp_magic.core.specs import CompareSpec, ModelSpec, PlanSpec, TrainSpec, TuneSpec
from fsdp_magic.core.specs.compare import Variant
from fsdp_magic.core.tuning import HoldRequest, RoomRequest, sizes_of
from fsdp_magic.notebook import display
from fsdp_magic.notebook.comparing import kept, set_aside
from fsdp_magic.notebook.found_size import FoundSize
from fsdp_magic.notebook.help import takes_options
from fsdp_magic.notebook.options import spec_of
from fsdp_magic.notebook.rooms import Rooms
from fsdp_magic.notebook.session_planning import Planning
from fsdp_magic.notebook.tuned import Tuned
from fsdp_magic.notebook.tuning import Tuner

_PLANNED_FROM = 8
"""Samples of the batch that a plan is made from, if the data have so many."""


class Tuning(Planning):
    """What a session can find out by running it."""

    @takes_options(TuneSpec, without=("output",))
    def tune(
        self, code: str | None = None, *, show: bool = True, name: str = "", **options: Any
    ) -> Tuned:
        """Find the micro-batch size of a training cell by running it on every rank.

        Whole steps are taken of one size after the other, and put back: weights, optimizers,
        schedulers, random states and the place in the data are afterwards as before. The next
        ``train`` on the same data takes the size unless it is told another.

        Args:
            code: the cell; None: the last one that was trained or tuned.
            show: show the live chart.
            name: file name in tracebacks; each call has one of its own.
            **options: as below; they mean what they mean for ``%%fsdp_tune``, and what is not
                given is as in the last cell where that is tried.

        Returns:
            The size, every probe, and a row for each strategy.

        Raises:
            UsageError: if there is no cell, or no data whose batches could have another size.
            OutOfMemoryOnRankError: if not even the smallest size fits; everything is as before.
            CellFailedError: if the cell failed otherwise; everything is as before.
            KeyboardInterrupt: if it was interrupted; everything is as before.
        """
        spec = spec_of(options, TuneSpec, call="session.tune", numbers=self.number)
        return self.tune_from(spec, code, show=show, name=name)

    def tune_from(
        self, spec: TuneSpec, code: str | None = None, *, show: bool = True, name: str = ""
    ) -> Tuned:
        """Find the micro-batch size as a spec says; see ``tune``."""
        self.engines.weights.refuse_torn()
        request = self._tried(spec, code, name)
        rooms = self._rooms(request, spec.margin)
        built: BuiltReport = self._quietly("built", {0: BuiltRequest()})[0].report
        variants = self._variants(spec, built)
        present = _name_of(built)
        tuned = Tuned(
            objective=spec.objective,
            margin=spec.margin,
            world_size=self.world_size,
            names=[each.name for each in variants] or [present],
            is_table=bool(variants),
            is_endless=rooms.most_samples is None and spec.max is None,
            use=lambda size: self._use(size, request.spec, tuned),
        )
        tuned.most = rooms.most_samples
        tuned.room_bytes = rooms.capacity_bytes
        sizes = sizes_of(tuned.most, spec, request.spec, ranks=self.world_size)
        tuner = Tuner(self.engines, request, spec, tuned, rooms=rooms, sizes=sizes, show=show)
        ways: dict[str, Variant | None] = {each.name: each for each in variants} or {present: None}
        if code is not None:
            self._history.tuning = request
        try:
            tuner.draw()
            predictions = self._predictions(request, built, ways, rooms, tuned)
            with self._kept(bool(variants)):
                for each, variant in ways.items():
                    tuner.search(each, variant, predictions.get(each))
                    if variant is not None:
                        is_present = all(variant.applied(s) == s for s in built.specs.values())
                        tuned.table[-1].is_present = is_present
            tuned.state = "done"
            self._take(tuned)
        except KeyboardInterrupt:
            tuned.state = "stopped"
            raise
        except BaseException:
            tuned.state = "failed"
            raise
        finally:
            tuner.draw(final=True)
            self._history.last_frame = tuned.last_frame
            if show:
                display.mark_shown(tuned)
        if show:
            tuned.show_slider()
        return tuned

    def _tried(self, spec: TuneSpec, code: str | None, name: str) -> TrainRequest:
        """Return the cell whose steps are tried.

        Raises:
            UsageError: if there is none, or no size to change.
        """
        last = self._history.tuning
        if code is None and last is None:
            raise UsageError(
                "%fsdp_tune tries the last training cell, or the last under %%fsdp_tune, and none "
                "has run; write the cell under a %%fsdp_tune, with --data NAME"
            )
        training = spec.training(None if code is not None or last is None else last.spec)
        if code is None and last is not None:
            return replace(last, spec=training, evaluation=None, steps_left=None)
        assert code is not None
        return TrainRequest(
            code=code, name=name or self._name("fsdp_tune"), run_id=0, spec=training
        )

    def _rooms(self, request: TrainRequest, margin: float) -> Rooms:
        replies = self._quietly("room", self._everywhere(RoomRequest(spec=request.spec)))
        return Rooms({rank: replies[rank].report for rank in sorted(replies)}, margin)

    def _variants(self, spec: TuneSpec, built: BuiltReport) -> tuple[Variant, ...]:
        if not spec.strategies:
            return ()
        if not built.specs:
            raise UsageError(
                "--strategies spread a model anew, and there is no sharded model; build one in "
                "%%fsdp_model, or leave --strategies out"
            )
        specs = tuple(built.specs.values())
        return CompareSpec(strategies=spec.strategies).variants(
            specs, world_size=self.world_size, ranks_on_host=built.ranks_on_host
        )

    def _kept(self, is_table: bool) -> AbstractContextManager[Any]:
        """Have everything inside that steps change as it was afterwards."""
        if is_table:
            return set_aside(self.engines, range(self.world_size))
        return kept(self.engines, "hold", self._everywhere(HoldRequest()))

    def _predictions(
        self,
        request: TrainRequest,
        built: BuiltReport,
        ways: Mapping[str, Variant | None],
        rooms: Rooms,
        tuned: Tuned,
    ) -> dict[str, Predicted]:
        """Return the peak of any size by strategy, where it can be planned.

        A search does without: then it begins at a small size.
        """
        if len(built.specs) != 1 or request.spec.manual:
            return {}
        (base,) = built.specs.values()
        specs = {n: base if v is None else v.applied(base) for n, v in ways.items()}
        try:
            plan = self._plan_of_sizes(request, specs, rooms, built)
        except (UsageError, CellFailedError) as error:
            tuned.notes.append(f"without a plan: {str(error).splitlines()[-1]}")
            return {}
        held = rooms.other_bytes
        return {name: _beside(held, plan[name].peak_bytes) for name in plan.strategies}

    def _plan_of_sizes(
        self,
        request: TrainRequest,
        specs: Mapping[str, ModelSpec],
        rooms: Rooms,
        built: BuiltReport,
    ) -> Any:
        most = rooms.most_samples or _PLANNED_FROM
        sized = replace(request.spec, micro_batch_size=min(most, _PLANNED_FROM))
        sized = replace(sized, global_batch_size=None)
        spec = PlanSpec()
        device = self._device_for(spec, built, world_size=self.world_size)
        accumulate = 2 if request.spec.global_batch_size else request.spec.accumulate
        return self._planned(
            replace(request, spec=sized),
            specs,
            device,
            world_size=self.world_size,
            accumulate=accumulate,
            spec=spec,
            timeout=request.spec.timeout,
        )

    def _take(self, tuned: Tuned) -> None:
        """Make what was found the default of the next training cell, where it is for its model."""
        present, best = tuned.present, tuned.best
        if present is not None and present.micro_batch_size:
            tuned.choose(present.micro_batch_size)
            tuned.notes.append(
                f"the next %%fsdp_train on the same data takes {present.micro_batch_size:,}; "
                "--micro-batch-size sets another"
            )
        if best is not None and best is not present:
            tuned.notes.append(
                f"{best.name} takes {best.micro_batch_size:,}; build the model with it in a "
                "%%fsdp_model cell, and train with --micro-batch-size "
                f"{best.micro_batch_size:,}"
            )

    def _use(self, size: int, spec: TrainSpec, tuned: Tuned) -> None:
        """Make a size that was found, or chosen after that, the default of training cells."""
        present, samples = tuned.present, None
        if tuned.most is not None and not spec.global_batch_size:
            samples = tuned.most * spec.accumulate
        fits = [] if present is None else [p.micro_batch_size for p in present.probes if p.fits]
        self._history.use(
            FoundSize(
                data=spec.data,
                micro_batch_size=size,
                fits=max(fits, default=size),
                accumulates=_accumulates(spec),
                global_batch_size=spec.global_batch_size,
                samples=samples,
            )
        )


def _accumulates(spec: TrainSpec) -> bool:
    """Return whether steps are tried that may hold gradients beside a forward."""
    return spec.manual or spec.accumulate > 1 or spec.global_batch_size is not None


def _beside(held: int, peak_bytes: Callable[[int], int]) -> Predicted:
    """Return the peaks of a plan beside what the process holds anyway."""
    return lambda size: float(peak_bytes(size) + held)


def _name_of(built: BuiltReport) -> str:
    """Return how the models are spread, in the words of ``--strategies``."""
    specs = list(built.specs.values())
    if not specs:
        return "as it is"
    base = specs[0]
    size = f":{base.shard_size}" if base.shard_size else ""
    added: list[str] = [base.precision] if base.precision != "fp32" else []
    added += ["cpu_offload"] if base.cpu_offload else []
    added += ["activation_checkpointing"] if base.activation_checkpointing else []
    return "+".join((f"{base.strategy}{size}", *added))
