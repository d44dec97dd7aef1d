"""The status of a session: the first thing that a person sees of it."""

from __future__ import annotations

import pytest
from panel_records import Page, assert_harmless, memory, numbers, rank_status

from fsdp_magic.core.telemetry import DeviceSample, RankStatus
from fsdp_magic.core.units import GIB
from fsdp_magic.panels import status


def shown(ranks: list[RankStatus]) -> tuple[str, str]:
    """The panel as a reader sees it, and its text."""
    return Page(status.html(ranks, stamp="14:03")).text, status.text(ranks, stamp="14:03")


def cpu_status(rank: int) -> RankStatus:
    empty = memory(
        allocated_bytes=0, reserved_bytes=0, used_bytes=0, peak_allocated_bytes=0,
        parameter_bytes=0, gradient_bytes=0, optimizer_bytes=0, capacity_bytes=8 * GIB,
    )  # fmt: skip
    return rank_status(
        rank, device="cpu", device_name="Xeon 8581C", memory=empty, models=(), steps=0,
        torch_version="2.13.0",
    )  # fmt: skip


def test_status_says_where_each_rank_is() -> None:
    ranks = [rank_status(0), rank_status(1)]
    for text in shown(ranks):
        for words in ("2 GPU ranks", "on node-a", "14:03", "4001", "cuda:1", "NVIDIA H100"):
            assert words in text
        for words in ("49.0", "51.0", "capacity 80.0 GiB each", "model · 640 steps done"):
            assert words in text
        assert "peak allocated" in text
        assert text.count("NVIDIA H100") == text.count("node-a") == text.count("640") == 1


def test_the_first_table_of_cpu_ranks_has_no_empty_column() -> None:
    for text in shown([cpu_status(0), cpu_status(1)]):
        assert text.startswith("2 CPU ranks")
        for words in ("Xeon 8581C", "capacity 8.0 GiB each", "torch 2.13.0", "4000", "4001"):
            assert words in text
        for noise in ("n/a", "steps", "model", "util", "parameters", "host", "device"):
            assert noise not in text


def test_what_tells_ranks_apart_is_a_column() -> None:
    other = rank_status(
        1, host="node-b", device_name="NVIDIA A100", models=("a", 'nets["G"]'), steps=7,
        memory=memory(capacity_bytes=40 * GIB),
    )  # fmt: skip
    for text in shown([rank_status(0), other]):
        for words in ("2 hosts", "node-a", "node-b", "NVIDIA H100", "NVIDIA A100", "40.0", "80.0"):
            assert words in text
        assert 'a, nets["G"] · 7 steps done' in text
        assert "model · 640 steps done" in text
        assert "each" not in text


def test_activity_is_shown_where_it_is_known() -> None:
    busy = DeviceSample(utilisation_percent=93, temperature_celsius=61)
    for text in shown([rank_status(0, activity=busy), rank_status(1)]):
        for words in ("util", "°C", "93 %", "61", "n/a"):
            assert words in text
        assert " W" not in text


def test_status_of_what_is_not_known() -> None:
    unknown = rank_status(0, memory=memory(capacity_bytes=None), models=(), device_name="")
    for text in shown([unknown]):
        assert text.startswith("1 GPU rank ")
        assert "n/a · capacity n/a" in text
        assert text.count("n/a") == 2


@pytest.mark.parametrize("ranks", [1, 2, 8, 15])
def test_status_has_a_row_per_rank(ranks: int) -> None:
    source = status.html([rank_status(rank) for rank in range(ranks)], stamp="")
    assert_harmless(source)
    assert len(Page(source).all("tr")) == ranks + 1


@pytest.mark.parametrize("hosts", [1, 8, 64])
def test_the_status_of_64_ranks_is_three_rows_and_a_strip(hosts: int) -> None:
    on = 64 // hosts
    ranks = [rank_status(r, host=f"node-{r // on}", memory=memory(r / 8)) for r in range(64)]
    source = status.html(ranks, stamp="")
    assert_harmless(source)
    assert len(source.encode()) <= 60_000
    assert len(Page(source).all("tr")) == 4
    assert f"rank 17 {'' if hosts == 1 else f'node-{17 // on} '}cuda:17 4017 41.1 GiB" in source
    for text in shown(ranks):
        for words in ("63 worst", "31 median", "0 best", "used memory, ranks 0 to 63"):
            assert words in text
        assert ("node-7: ranks 56-63" in text) == (hosts == 8)
        assert ("48 more hosts" in text) == (hosts == 64)


@pytest.mark.parametrize("world", [2, 64])
def test_the_text_has_the_numbers_of_the_page(world: int) -> None:
    ranks = [rank_status(rank, models=()) for rank in range(world)]
    page, text = shown(ranks)
    page = page.split("used memory")[0]
    drawn = {size for rank in ranks for size in numbers(_parts(rank))}
    assert numbers(page) - numbers(text) - drawn == set()
    assert numbers(text) - numbers(page) == set()


def _parts(rank: RankStatus) -> str:
    """The bar in words, which text draws as letters."""
    sample = rank.memory
    sizes = (
        sample.parameter_bytes, sample.gradient_bytes, sample.optimizer_bytes,
        sample.activation_bytes, sample.cache_bytes, sample.other_bytes,
    )  # fmt: skip
    return " ".join(f"{size / GIB:.1f}" for size in sizes)
