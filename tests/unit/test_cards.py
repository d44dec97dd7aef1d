"""What a plan is made for: cards by name, memory by size, and how fast they would be."""

from __future__ import annotations

import re

import pytest
from plan_records import device, memory_plan, step_trace, strategy_plan

from fsdp_magic.core.errors import UsageError
from fsdp_magic.core.planning.cards import CARDS, find_card
from fsdp_magic.core.planning.device import (
    COMMUNICATION_BYTES,
    CONTEXT_BYTES,
    cpu_engine,
    gpu,
)
from fsdp_magic.core.planning.overlay import Setting
from fsdp_magic.core.planning.roofline import traffic_of
from fsdp_magic.core.planning.step_trace import Size
from fsdp_magic.core.units import GIB


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("A100-80GB", "A100-80GB"),
        ("a100 80g", "A100-80GB"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("Tesla T4", "T4"),
        ("RTX 4090", "RTX-4090"),
        ("NVIDIA GeForce RTX 3090", "RTX-3090"),
        ("3090", "RTX-3090"),
        ("titan rtx", "Titan-RTX"),
        ("H100", "H100-80GB"),
        ("NVIDIA L40S", "L40S"),
    ],
)
def test_a_card_is_found_by_the_names_people_type(typed: str, name: str) -> None:
    assert gpu(typed, world_size=2).name == find_card(typed, what="--gpu-memory").name == name


def test_every_card_is_found_by_its_own_name_and_has_sources() -> None:
    for card in CARDS:
        assert gpu(card.name, world_size=2).card is card
        assert card.memory_source.startswith("https://")
        assert card.data_sheet


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("A100", "'A100' is sold in more than one size; say A100-40GB or A100-80GB"),
        ("A100-80BG", "did you mean A100-80GB? type a size such as 24GiB, or one of T4, V100"),
        ("24", "--gpu-memory '24' has no unit; type --gpu-memory 24GiB"),
        ("24 Tea", "'24 Tea' is neither a size nor a card that is known; type a size such as"),
        ("", "'' is neither a size nor a card"),
        ("1GiB", "--gpu-memory 1.0 GiB leaves nothing for tensors: CUDA and NCCL take 1.2 GiB"),
    ],
)
def test_what_is_neither_a_size_nor_a_card_is_refused_in_one_line(typed: str, said: str) -> None:
    with pytest.raises(UsageError, match=re.escape(said)) as refused:
        gpu(typed, world_size=2)
    assert "\n" not in str(refused.value)


def test_what_is_outside_the_allocator_is_not_usable_and_one_rank_needs_no_nccl() -> None:
    two, one = gpu("24GiB", world_size=2), gpu("24GiB", world_size=1)
    assert two.name == "24 GiB"
    assert two.usable_bytes == 24 * GIB - CONTEXT_BYTES - COMMUNICATION_BYTES
    assert one.usable_bytes == 24 * GIB - CONTEXT_BYTES
    assert gpu("24GiB", world_size=2, context_bytes=0, communication_bytes=5).usable_bytes == (
        24 * GIB - 5
    )
    assert cpu_engine(2 * GIB).usable_bytes == 2 * GIB


# ---------------------------------------------------------------- speed


@pytest.mark.parametrize(
    ("setting", "link"),
    [
        ({"strategy": "ddp"}, 2 * 4),
        ({"strategy": "zero1"}, 2 * 4 + 4),
        ({"strategy": "shard_grad_op"}, 4 + 4),
        ({"strategy": "full_shard"}, 2 * 4 + 4),
        ({"strategy": "full_shard", "accumulate": 3}, 3 * (2 * 4 + 4)),
        ({"strategy": "full_shard", "accumulate": 3, "accumulate_sync": "last"}, 3 * 2 * 4 + 4),
        ({"strategy": "ddp", "accumulate": 3}, 2 * 4),
    ],
)
def test_bytes_over_the_link_are_those_of_rings(setting: dict[str, object], link: int) -> None:
    trace = step_trace()
    elements = sum(p.elements for p in trace.parameters.values())
    moved = traffic_of(trace, Setting(world_size=4, **setting)).link_bytes  # type: ignore[arg-type]
    assert moved == pytest.approx(3 / 4 * link * elements)


def test_groups_of_a_hybrid_add_their_replicas_and_one_rank_sends_nothing() -> None:
    trace = step_trace()
    elements = sum(p.elements for p in trace.parameters.values())
    hybrid = Setting(strategy="hybrid_shard", world_size=8, shard_size=4)
    inside, between = 3 / 4 * (2 * 4 + 4), 2 * 1 / 2 * 4 / 4
    assert traffic_of(trace, hybrid).link_bytes == pytest.approx((inside + between) * elements)
    assert traffic_of(trace, Setting(world_size=1)).link_bytes == 0
    offloaded = Setting(world_size=4, cpu_offload=True)
    assert traffic_of(trace, offloaded).host_bytes == pytest.approx(2 * 4 / 4 * elements)


def test_strategies_are_ranked_by_time_per_sample_and_only_where_a_card_is_known() -> None:
    assert memory_plan().ranking() == {}
    slow_link = device(card=find_card("T4", what=""))
    plan = memory_plan("full_shard", "shard_grad_op", "full_shard+cpu_offload", device=slow_link)
    paces = plan.paces()
    order = sorted(paces, key=lambda name: paces[name].seconds_per_sample)
    assert [plan.ranking()[name] for name in order] == sorted(plan.ranking().values())
    assert plan.recommended == order[0]


def test_of_two_that_compute_alike_the_one_that_sends_less_is_ahead() -> None:
    plan = memory_plan("full_shard", "ddp", device=device(card=find_card("T4", what="")))
    size = {"micro_batch_size": 4}
    plan = memory_plan(strategies=plan.strategies, device=plan.device, **size)
    assert plan.ranking() == {"ddp": 1, "full_shard": 2}


def test_the_longest_of_computing_memory_and_link_is_what_limits() -> None:
    def limit(**changes: Size) -> str:
        plan = strategy_plan("full_shard", **changes)
        found = memory_plan(
            strategies={"full_shard": plan}, device=device(card=find_card("T4", what=""))
        )
        return found.paces()["full_shard"].limit

    assert limit(flops=Size(0, 1e16)) == "computing"
    assert limit(moved=Size(1e15)) == "the card's memory"
    assert limit(flops=Size(0, 1), moved=Size(0)) == "the link between cards"


def test_what_does_not_fit_has_no_rank() -> None:
    tiny = device(capacity_bytes=1, card=find_card("T4", what=""))
    plan = memory_plan("ddp", device=tiny)
    assert plan.max_micro_batch_size == {"ddp": 0}
    assert plan.ranking() == {}
    assert plan.recommended == "ddp"


def test_without_speeds_the_strategy_shown_is_that_of_most_samples_without_offload() -> None:
    names = ("ddp", "full_shard", "full_shard+cpu_offload")
    assert memory_plan(*names).recommended == "full_shard"
    assert memory_plan(*names[::2]).recommended == "ddp"
    least = memory_plan(*names).peak_bytes("full_shard+cpu_offload", 1)
    tight = device(kind="cpu", capacity_bytes=least)
    assert memory_plan(*names, device=tight).recommended == "full_shard+cpu_offload"
