"""The options that training and evaluation share: which data, in which batches; pure."""

from __future__ import annotations

from dataclasses import dataclass

from fsdp_magic.core.errors import UsageError
from fsdp_magic.core.options import option
from fsdp_magic.core.specs.checks import above, at_least, bound_name, text


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSpec:
    """Which data a cell reads, how long it may take, and where its result goes."""

    data: str | None = option(
        "--data",
        default=None,
        takes="NAME",
        completes="engines",
        help="a data set, DataLoader, iterable or function on the engines, or several with "
        "commas between them; binds `batch`",
        habits=("--dataset", "--train-data"),
    )
    collate: str | None = option(
        "--collate",
        default=None,
        takes="NAME",
        completes="engines",
        help="a function: list of samples -> batch",
    )
    micro_batch_size: int | None = option(
        "--micro-batch-size",
        default=None,
        takes="B",
        completes="engines",
        help="samples per rank per forward; default 8, or a DataLoader's own",
        habits=("--per-device-train-batch-size", "--batch-size"),
    )
    timeout: float | None = option(
        "--timeout",
        default=None,
        takes="SECONDS",
        completes="engines",
        help="stop after this time and raise an error",
    )
    output: str | None = option(
        "-o", default=None, takes="NAME", help="bind what is returned to this name in the notebook"
    )

    def __post_init__(self) -> None:
        text("--data", self.data)
        text("--collate", self.collate)
        at_least("--micro-batch-size", self.micro_batch_size, 1)
        above("--timeout", self.timeout, 0)
        if self.data is None:
            self.need_no_data(
                ("--collate", self.collate), ("--micro-batch-size", self.micro_batch_size)
            )
        bound_name("-o", self.output, such_as="run")

    def need_no_data(self, *options: tuple[str, object]) -> None:
        """Raise if an option was given that only means something with data."""
        for flag, value in options:
            if value is not None:
                raise UsageError(f"{flag} needs data; add --data NAME, or leave {flag} out")
