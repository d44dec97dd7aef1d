"""The options of ``%%fsdp_tune``: which data and step, which goal, and how far to go; pure."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal, get_args

from fsdp_magic.core.errors import UsageError
from fsdp_magic.core.options import again, option
from fsdp_magic.core.specs.checks import at_least, bound_name, choice
from fsdp_magic.core.specs.compare import ADDED, EVERY, listed_strategies
from fsdp_magic.core.specs.train import DataSharding, LossKind, TrainSpec
from fsdp_magic.core.wording import quoted

Objective = Literal["memory", "throughput"]
MARGIN = 0.05
"""Share of a device that is left free: batches differ in length, and allocators fragment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneSpec:
    """What is tuned, on which data; tried again, the last cell says what is not given."""

    max: int | None = option(
        "--max",
        default=None,
        takes="N",
        completes="engines",
        habits=("--max-micro-batch-size", "--max-batch-size"),
        help="the largest micro-batch size to try; default what the data fill",
    )
    objective: Objective = option(
        "--objective",
        default="memory",
        takes="GOAL",
        choices=get_args(Objective),
        help="memory: the largest size that fits; throughput: the one of most samples a second",
    )
    margin: float = option(
        "--margin",
        default=MARGIN,
        takes="X",
        completes="engines",
        help="share of each device's memory that must stay free, for batches that are larger",
    )
    strategies: tuple[str, ...] = option(
        "--strategies",
        default=(),
        takes="A,B,C",
        listed=EVERY,
        added=ADDED,
        help="tune under each of these: STRATEGY[+PRECISION][+cpu_offload]"
        "[+activation_checkpointing], such as ddp,full_shard+bf16; default as the model is built",
    )
    data: str | None = again(TrainSpec, "data")
    collate: str | None = again(TrainSpec, "collate")
    data_sharding: DataSharding | None = again(TrainSpec, "data_sharding")
    no_shuffle: bool | None = again(TrainSpec, "no_shuffle")
    accumulate: int | None = again(TrainSpec, "accumulate")
    global_batch_size: int | None = again(TrainSpec, "global_batch_size")
    max_grad_norm: float | None = again(TrainSpec, "max_grad_norm")
    loss: LossKind | None = again(TrainSpec, "loss")
    manual: bool | None = again(TrainSpec, "manual")
    timeout: float | None = option(
        "--timeout",
        default=None,
        takes="SECONDS",
        completes="engines",
        help="stop a size that takes longer than this, and raise an error",
    )
    output: str | None = option(
        "-o", default=None, takes="NAME", help="bind the result to this name in the notebook"
    )

    def __post_init__(self) -> None:
        at_least("--max", self.max, 1)
        objective = str(self.objective).lower()
        choice("--objective", objective, get_args(Objective))
        object.__setattr__(self, "objective", objective)
        self._check_margin()
        object.__setattr__(self, "strategies", listed_strategies(self.strategies))
        if self.accumulate is not None and self.global_batch_size is not None:
            raise UsageError(
                f"--global-batch-size {self.global_batch_size} sets --accumulate; give one of the "
                "two"
            )
        bound_name("-o", self.output, such_as="tuned")
        # what training refuses is refused now, not when it is known which cell is tried
        TrainSpec(**{"data": "data", **self._given()}, timeout=self.timeout)

    def _given(self) -> dict[str, Any]:
        """Return the options of training that were given."""
        fields = ((name, getattr(self, name)) for name in _OF_TRAINING)
        return {name: value for name, value in fields if value is not None}

    def _check_margin(self) -> None:
        margin = self.margin
        is_number = isinstance(margin, (int, float)) and not isinstance(margin, bool)
        if not is_number or not 0 <= margin < 1:
            raise UsageError(
                f"--margin {quoted(margin)} cannot work; it takes a share from 0 to below 1, such "
                f"as {MARGIN}"
            )

    def training(self, last: TrainSpec | None) -> TrainSpec:
        """Return the options of the steps that are tried; their size and number are not set.

        Args:
            last: of the training cell that is tried again; None: it is a cell of its own.

        Raises:
            UsageError: if there is nothing whose size could be changed.
        """
        spec = last or TrainSpec()
        given = self._given()
        if self.accumulate is not None:
            given["global_batch_size"] = None
        if self.global_batch_size is not None:
            given["accumulate"] = 1
        data = given.get("data", spec.data)
        if data is None:
            raise UsageError(
                "%fsdp_tune changes how many samples a step reads, so it needs data; add --data "
                "NAME"
            )
        if spec.tokens_per_batch is not None and "data" not in given:
            raise UsageError(
                f"the last training cell takes --tokens-per-batch {spec.tokens_per_batch}, and "
                "%fsdp_tune changes samples; write the cell under a %%fsdp_tune, with --data NAME"
            )
        is_manual = given.get("manual", spec.manual)
        return dataclasses.replace(
            spec,
            **{**_WITHOUT, **given},
            steps=1,
            # of which it is not known whether they count steps or epochs: all is put back anyway
            scheduler_every=None if is_manual else spec.scheduler_every or "step",
            timeout=self.timeout or spec.timeout,
        )


_OF_TRAINING = (
    "data",
    "collate",
    "data_sharding",
    "no_shuffle",
    "accumulate",
    "global_batch_size",
    "max_grad_norm",
    "loss",
    "manual",
)
_WITHOUT: dict[str, Any] = {
    "micro_batch_size": None,
    "tokens_per_batch": None,
    "epochs": None,
    "eval_every": None,
    "eval_data": None,
    "snapshot_every": None,
    "log": None,
    "after_step": None,
    "nan": "show",
    "trial": False,
    "resume": False,
    "output": None,
}
"""What a step of a search does not do: all that is beside the step, or that would last."""
