"""The options of ``%fsdp_plan``: which hardware and strategies are planned for; pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

from fsdp_magic.core.errors import UsageError
from fsdp_magic.core.options import option
from fsdp_magic.core.planning.cards import CARDS
from fsdp_magic.core.specs.checks import at_least, bound_name, choice
from fsdp_magic.core.specs.compare import (
    ADDED,
    EVERY,
    Variant,
    listed_strategies,
    ranks_of_a_copy,
)
from fsdp_magic.core.specs.strategy import PRECISION_HABITS, AccumulateSync, Precision
from fsdp_magic.core.specs.wrap import checked_wrap
from fsdp_magic.core.units import parse_bytes
from fsdp_magic.core.wording import quoted

PLANNED = (
    "ddp",
    "zero1",
    "shard_grad_op",
    "full_shard",
    "full_shard+activation_checkpointing",
    "full_shard+cpu_offload",
)
"""What is planned where nobody names strategies, from the one that holds most on a rank."""
GPU_MEMORY = "24GiB"
"""What is planned for where nobody says it and there are no engines."""
RANKS_ON_HOST = 8
"""GPUs of a host that is not here. Source: the servers that vendors sell, DGX and HGX."""
_MOST_RANKS = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSpec:
    """Which hardware and strategies are planned for."""

    gpu_memory: str | None = option(
        "--gpu-memory",
        default=None,
        takes="SIZE|CARD",
        offers=tuple(card.name for card in CARDS if " " not in card.name),
        habits=("--gpu", "--card", "--memory", "--vram", "--device-memory"),
        help="memory of each GPU, as a size or by the card's name: 24GiB, A100-80GB; a name has "
        f"strategies ranked by speed too; default {GPU_MEMORY}, or the session's own devices",
    )
    world_size: int | None = option(
        "--world-size",
        default=None,
        takes="N",
        habits=("--gpus", "--num-gpus", "--num-processes", "--nproc-per-node", "-n", "--ranks"),
        help="GPUs, one rank each; default 2, or the session's ranks",
    )
    seq_len: int | None = option(
        "--seq-len",
        default=None,
        takes="L",
        habits=("--sequence-length", "--seq-length", "--max-seq-len", "--max-length"),
        shorthands=(("--max-seq-length", "{}"), ("--block-size", "{}")),
        help="tokens of each sample, where the batch is not the cell's own; default the most that "
        "the model takes",
    )
    strategies: tuple[str, ...] = option(
        "--strategies",
        default=(),
        takes="A,B,C",
        listed=EVERY,
        added=ADDED,
        habits=("--strategy",),
        help="strategies to plan, each with what it adds: "
        "STRATEGY[+PRECISION][+cpu_offload][+activation_checkpointing], such as "
        "ddp,full_shard+bf16; hybrid_shard:N has copies of N ranks; default "
        f"{', '.join(PLANNED)}",
    )
    micro_batch_size: int | None = option(
        "--micro-batch-size",
        default=None,
        takes="B",
        habits=("--per-device-train-batch-size", "--batch-size"),
        help="samples per rank per forward that bars and picture show; default the largest that "
        "is safe",
    )
    precision: Precision | None = option(
        "--precision",
        default=None,
        takes="PRECISION",
        choices=get_args(Precision),
        habits=("--mixed-precision",),
        shorthands=(("--bf16", "bf16"), ("--fp16", "fp16"), ("--fp32", "fp32")),
        help="what strategies compute in that do not say it; default fp32, or the session's",
    )
    accumulate: int | None = option(
        "--accumulate",
        default=None,
        takes="K",
        habits=("--gradient-accumulation-steps",),
        help="micro-steps of an optimizer step; default 1, or the last training cell's",
    )
    accumulate_sync: AccumulateSync | None = option(
        "--accumulate-sync",
        default=None,
        takes="WHEN",
        choices=get_args(AccumulateSync),
        help="when gradients are reduced with --accumulate: at every micro-step, or at the last",
    )
    wrap: str | None = option(
        "--wrap",
        default=None,
        takes="RULE",
        habits=("--fsdp-transformer-layer-cls-to-wrap",),
        shorthands=(("--fsdp-min-num-params", "size:{}"), ("--min-num-params", "size:{}")),
        offers=("blocks", "size:", "none"),
        help="what is gathered at once: blocks, size:NUM_PARAMS, CLASS[,CLASS] or none; default "
        "blocks, or the session's",
    )
    context_memory: str | None = option(
        "--context-memory",
        default=None,
        takes="SIZE",
        habits=("--cuda-context",),
        help="what CUDA takes of each GPU outside of torch's allocator; the plan shows its default",
    )
    nccl_memory: str | None = option(
        "--nccl-memory",
        default=None,
        takes="SIZE",
        help="what NCCL takes of each GPU outside of torch's allocator; the plan shows its default",
    )
    no_cache: bool = option(
        "--no-cache", default=False, help="trace the cell again, also if nothing has changed"
    )
    output: str | None = option(
        "-o", default=None, takes="NAME", help="bind the plan to this name in the notebook"
    )

    def __post_init__(self) -> None:
        self._set("strategies", _listed(self.strategies))
        if self.gpu_memory is not None:
            self._set("gpu_memory", str(self.gpu_memory))
        for flag, value, most in (
            ("--world-size", self.world_size, _MOST_RANKS),
            ("--seq-len", self.seq_len, None),
            ("--micro-batch-size", self.micro_batch_size, None),
            ("--accumulate", self.accumulate, None),
        ):
            at_least(flag, value, 1)
            if most is not None and value is not None and value > most:
                raise UsageError(f"{flag} {quoted(value)} cannot work; it takes up to {most:,}")
        self._set_word("precision", Precision)
        self._set_word("accumulate_sync", AccumulateSync)
        if self.wrap is not None:
            self._set("wrap", checked_wrap(self.wrap))
        for flag, size in (
            ("--context-memory", self.context_memory),
            ("--nccl-memory", self.nccl_memory),
        ):
            if size is not None and str(size).strip() != "0":
                parse_bytes(size, what=flag)
        bound_name("-o", self.output, such_as="plan")

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _set_word(self, name: str, allowed: Any) -> None:
        """Keep one of the words that an option takes, typed in any case or as a habit is."""
        value = getattr(self, name)
        if value is None:
            return
        word = str(value).lower()
        word = PRECISION_HABITS.get(word, word) if allowed is Precision else word
        choice(f"--{name.replace('_', '-')}", word, get_args(allowed))
        self._set(name, word)

    @property
    def context_bytes(self) -> int | None:
        """What CUDA takes outside the allocator; None: the default."""
        return _size("--context-memory", self.context_memory)

    @property
    def nccl_bytes(self) -> int | None:
        """What NCCL takes outside the allocator; None: the default."""
        return _size("--nccl-memory", self.nccl_memory)

    def variants(
        self, *, world_size: int, ranks_on_host: int, also: Sequence[str] = ()
    ) -> tuple[Variant, ...]:
        """Return what is planned.

        Args:
            world_size: ranks.
            ranks_on_host: ranks of each host.
            also: what is planned beside the default strategies, if those are planned.

        Raises:
            UsageError: if copies of the model do not share the ranks evenly.
        """
        asked = self.strategies or tuple(dict.fromkeys((*also, *PLANNED)))
        size = ranks_of_a_copy(world_size, ranks_on_host)
        variants = tuple(Variant.parsed(text).sized(size) for text in asked)
        for variant in variants:
            _refuse_uneven_copies(variant, world_size)
        return variants


def _listed(given: Any) -> tuple[str, ...]:
    """Return the names of strategies as they are shown, if all of them can be planned."""
    strategies = listed_strategies(given)
    for name in strategies:
        _refuse_offload_of_whole(name)
    return strategies


def _refuse_offload_of_whole(name: str) -> None:
    variant = Variant.parsed(name)
    if dict(variant.changes).get("cpu_offload") and variant.strategy in ("ddp", "zero1"):
        raise UsageError(
            f"--strategies {name}: cpu_offload keeps shards of parameters in host memory, and "
            f"{variant.strategy} makes none; use it with full_shard, shard_grad_op or hybrid_shard"
        )


def _refuse_uneven_copies(variant: Variant, world_size: int) -> None:
    """Refuse copies that are not of equally many ranks, as engines do."""
    size = dict(variant.changes).get("shard_size", 1)
    if world_size % size:
        divisors = ", ".join(str(n) for n in range(2, world_size) if world_size % n == 0)
        takes = f"it takes {divisors}" if divisors else "no size does; use full_shard"
        raise UsageError(
            f"--strategies {variant.name}: {size} does not divide {world_size:,} ranks; {takes}"
        )


def _size(flag: str, text: str | None) -> int | None:
    if text is None:
        return None
    return 0 if str(text).strip() == "0" else parse_bytes(text, what=flag)
