"""The options of ``%%fsdp_train``; pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

from fsdp_magic.core.errors import UsageError
from fsdp_magic.core.options import option
from fsdp_magic.core.specs.checks import above, at_least, choice, text
from fsdp_magic.core.specs.data import DataSpec
from fsdp_magic.core.wording import quoted

DataSharding = Literal["auto", "none"]
LossKind = Literal["mean", "tokens", "sum"]
SchedulerEvery = Literal["step", "epoch"]
NonFinite = Literal["show", "stop"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSpec(DataSpec):
    """How a cell runs as training steps."""

    data_sharding: DataSharding = option(
        "--data-sharding",
        default="auto",
        takes="HOW",
        choices=get_args(DataSharding),
        help="auto: ranks get disjoint parts of --data; none: every rank reads all of it",
    )
    no_shuffle: bool = option(
        "--no-shuffle", default=False, help="take the samples in their own order"
    )
    tokens_per_batch: int | None = option(
        "--tokens-per-batch",
        default=None,
        takes="N",
        completes="engines",
        help="batches of samples of like length, at most N tokens each, padding included",
    )
    steps: int | None = option(
        "--steps",
        default=None,
        takes="N",
        completes="engines",
        help="optimizer steps; without it and without --epochs: one epoch of --data, or 1",
        habits=("--max-steps",),
    )
    epochs: int | None = option(
        "--epochs",
        default=None,
        takes="E",
        completes="engines",
        help="times through --data",
        habits=("--num-train-epochs",),
    )
    accumulate: int = option(
        "--accumulate",
        default=1,
        takes="K",
        completes="engines",
        help="micro-batches per optimizer step",
        habits=("--gradient-accumulation-steps",),
    )
    global_batch_size: int | None = option(
        "--global-batch-size",
        default=None,
        takes="G",
        completes="engines",
        help="samples of all ranks per optimizer step; sets --accumulate",
    )
    max_grad_norm: float | None = option(
        "--max-grad-norm",
        default=None,
        takes="X",
        completes="engines",
        help="clip the global gradient norm to this",
        habits=("--clip",),
    )
    loss: LossKind = option(
        "--loss",
        default="mean",
        takes="KIND",
        choices=get_args(LossKind),
        help="what `loss` is of its batch: a mean over samples, a mean over labels, or a sum",
    )
    scheduler_every: SchedulerEvery | None = option(
        "--scheduler-every",
        default=None,
        takes="UNIT",
        choices=get_args(SchedulerEvery),
        help="when learning rate schedulers step; step unless told otherwise",
    )
    nan: NonFinite = option(
        "--nan",
        default="show",
        takes="HOW",
        choices=get_args(NonFinite),
        help="at a loss that is not finite: show it and go on, or stop before its step",
    )
    eval_every: int | str | None = option(
        "--eval-every",
        default=None,
        takes="N",
        completes="engines",
        choices=("N", "epoch"),
        help="evaluate every N steps, or after each epoch",
        habits=("--eval-steps",),
    )
    eval_data: str | None = option(
        "--eval-data",
        default=None,
        takes="NAME",
        completes="engines",
        help="evaluate this cell on these data; without it the last %%fsdp_eval again",
    )
    snapshot_every: int | None = option(
        "--snapshot-every",
        default=None,
        takes="N",
        completes="engines",
        help="every N steps keep everything in host memory, for when an engine or a step is lost",
    )
    log: str | Callable[..., Any] | None = option(
        "--log",
        default=None,
        takes="FUNC",
        completes="notebook",
        help="a function of the notebook, called as FUNC({...}, step=n) after every step",
    )
    after_step: str | None = option(
        "--after-step",
        default=None,
        takes="NAME",
        completes="engines",
        help="a function on the engines, called on every rank after every optimizer step",
    )
    manual: bool = option(
        "--manual",
        default=False,
        help="the cell is one whole step: backward, clipping and optimizers are its own",
    )
    trial: bool = option(
        "--trial", default=False, help="put everything back as it was when the run has ended"
    )
    resume: bool = option("--resume", default=False, help="finish the run that ended early")

    def __post_init__(self) -> None:
        DataSpec.__post_init__(self)
        text("--eval-data", self.eval_data)
        text("--after-step", self.after_step)
        for flag, value in (
            ("--steps", self.steps),
            ("--epochs", self.epochs),
            ("--accumulate", self.accumulate),
            ("--global-batch-size", self.global_batch_size),
            ("--tokens-per-batch", self.tokens_per_batch),
            ("--snapshot-every", self.snapshot_every),
        ):
            at_least(flag, value, 1)
        above("--max-grad-norm", self.max_grad_norm, 0)
        self._check_choices()
        self._check_evaluation()
        if self.log is not None and not isinstance(self.log, str) and not callable(self.log):
            raise UsageError(
                f"--log is a {type(self.log).__name__}; it takes a function, called as "
                "FUNC({...}, step=n)"
            )
        if self.data is None:
            self.need_no_data(
                ("--epochs", self.epochs),
                ("--no-shuffle", self.no_shuffle or None),
                ("--tokens-per-batch", self.tokens_per_batch),
                ("--global-batch-size", self.global_batch_size),
                ("--data-sharding", None if self.data_sharding == "auto" else self.data_sharding),
                ("--eval-data", self.eval_data),
            )
        self._refuse_contradictions()
        if self.manual:
            self._refuse_for_manual()

    def _check_choices(self) -> None:
        for name, flag, kind in (
            ("data_sharding", "--data-sharding", DataSharding),
            ("loss", "--loss", LossKind),
            ("nan", "--nan", NonFinite),
            ("scheduler_every", "--scheduler-every", SchedulerEvery),
        ):
            value = getattr(self, name)
            if value is not None:
                lowered = str(value).lower()
                choice(flag, lowered, get_args(kind))
                object.__setattr__(self, name, lowered)

    def _check_evaluation(self) -> None:
        every = self.eval_every
        if every is None:
            if self.eval_data is not None:
                raise UsageError(
                    "--eval-data needs to know when; add --eval-every N or --eval-every epoch"
                )
            return
        if isinstance(every, str):
            if every.lower() != "epoch":
                raise UsageError(
                    f"--eval-every {quoted(every)} cannot work; it takes a whole number or epoch"
                )
            object.__setattr__(self, "eval_every", "epoch")
            if self.data is None:
                raise UsageError("--eval-every epoch needs data; add --data NAME, or give a number")
            return
        at_least("--eval-every", every, 1)

    def _refuse_contradictions(self) -> None:
        if self.steps is not None and self.epochs is not None:
            raise UsageError(
                f"--steps {self.steps} and --epochs {self.epochs} say two lengths; give one"
            )
        if self.global_batch_size is not None and self.accumulate != 1:
            raise UsageError(
                f"--global-batch-size {self.global_batch_size} sets --accumulate; give one of the "
                "two"
            )
        if self.tokens_per_batch is not None:
            for flag, value in (
                ("--micro-batch-size", self.micro_batch_size),
                ("--global-batch-size", self.global_batch_size),
            ):
                if value is not None:
                    raise UsageError(
                        f"--tokens-per-batch {self.tokens_per_batch} and {flag} {value} say two "
                        "sizes of a batch; give one"
                    )
        if self.trial and self.snapshot_every is not None:
            raise UsageError(
                "--trial puts everything back at its end, and --snapshot-every keeps what comes "
                "before it; give one"
            )
        if self.trial and self.resume:
            raise UsageError("--trial takes every step back and --resume keeps them; give one")

    def _refuse_for_manual(self) -> None:
        if self.eval_data is not None:
            raise UsageError(
                "--eval-data evaluates the cell itself, and a --manual cell trains; write a "
                "%%fsdp_eval cell, run it once, and leave --eval-data out"
            )
        for flag, given, instead in (
            ("--accumulate", self.accumulate != 1, "call backward() several times in the cell"),
            ("--global-batch-size", self.global_batch_size, "call backward() several times"),
            ("--max-grad-norm", self.max_grad_norm, "clip in the cell"),
            ("--loss", self.loss != "mean", "weigh the loss in the cell"),
            ("--nan", self.nan != "show", "call fsdp.stop() in the cell"),
            ("--scheduler-every", self.scheduler_every, "step schedulers in the cell"),
        ):
            if given:
                raise UsageError(f"{flag} is the cell's own business with --manual; {instead}")
