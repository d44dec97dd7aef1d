"""Panels on plain pages in Chromium: no frame jumps, nothing sticks out, nothing hostile runs."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import pytest
from lab import chromium, missing
from panel_records import (
    HOSTILE,
    cpu_rank,
    evaluated,
    evaluation_record,
    gpu_rank,
    history,
    memory,
    parameter,
    placement,
    rank_status,
    unknown_ranks,
    view,
)
from plan_records import memory_plan
from tuner_records import probe, search, tuned_rows

from fsdp_magic.core.whereabouts import Whereabouts
from fsdp_magic.panels import comparison, evaluation, mosaic, plan, status, training, tuner
from fsdp_magic.panels.comparison import ComparedView, ComparisonView
from fsdp_magic.panels.plan_view import PlanView, view_of
from fsdp_magic.panels.tuner_view import TunerView
from fsdp_magic.panels.waiting import WaitingView

if TYPE_CHECKING:
    from playwright.sync_api import Page

WIDTHS = (936, 376)
LONG_NAME = "full_shard+bf16+cpu_offload+activation_checkpointing"


@dataclass(kw_only=True)
class Seen:
    """What was seen.

    Attributes:
        heights: of the frames of a run, by width of the page and by its ranks.
        boxes: of hostile panels: width of the page; then height, width, width that is needed.
        happened: dialogs and requests of hostile panels.
        cut_off: pixels of comparison, plan and tuner that their frames hide, by width of the page.
    """

    heights: dict[tuple[int, str], set[int]] = field(default_factory=dict)
    boxes: list[tuple[int, list[int]]] = field(default_factory=list)
    happened: list[str] = field(default_factory=list)
    cut_off: dict[int, list[int]] = field(default_factory=dict)


@pytest.fixture(scope="module")
def seen(test_run: str, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """Show everything, close the browser, and return what was seen."""
    if reason := missing():
        if os.environ.get("FSDP_MAGIC_REQUIRE_BROWSER") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    seen = Seen()
    with chromium(tmp_path_factory.mktemp("pages")) as page:
        for width in WIDTHS:
            for world, gpu in ((2, False), (8, True), (64, True)):
                measured = shown(page, frames(world, gpu=gpu), width)
                run = f"{world} {'GPU' if gpu else 'CPU'} ranks"
                seen.heights[width, run] = {height for height, _, _ in measured}
            measured = shown(page, waiting_frames(), width)
            seen.heights[width, "ranks that wait"] = {height for height, _, _ in measured}
            measured = shown(page, [tuner.html(view) for view in tuner_views()], width)
            seen.heights[width, "tuner"] = {height for height, _, _ in measured}
            wide = [
                comparison.html(compared(LONG_NAME)),
                plan.html(planned(LONG_NAME, 6)),
                tuner.html(tuned(LONG_NAME)),
            ]
            shown(page, wide, width)
            seen.cut_off[width] = page.evaluate(
                "[...document.body.children].map(panel => panel.scrollWidth - panel.clientWidth)"
            )
        page.on("dialog", lambda dialog: seen.happened.append(dialog.message))
        page.on("request", lambda request: seen.happened.append(request.url))
        for width in WIDTHS:
            for bad in (HOSTILE, "W" * 10_000):
                seen.boxes += [(width, box) for box in shown(page, hostile_panels(bad), width)]
    return seen


def waiting_frames() -> list[str]:
    """A run whose ranks wait for each other, and the same when they have gone on."""
    line = "loss = ((model(x).squeeze(-1) - y) ** 2).mean()"
    gathers = Whereabouts(line=4, source=line, doing="gathers `model`", missing=(1,), seconds=8)
    places = {0: gathers, 1: Whereabouts(line=2, source="time.sleep(14)")}
    table = WaitingView(places=places, hint="it goes on when the others come")
    return [training.html(view(waiting=table)), training.html(view(waited=table))]


def compared(name: str, failure: str = "out of memory: rank 1 had 2 GiB") -> ComparisonView:
    ran = ComparedView(
        name=name, losses=(6.5,), seconds_per_step=1.1, samples_per_second=1980.0,
        difference=1e-7, memory=memory(), peak_bytes=(memory().peak_allocated_bytes,),
        is_present=True,
    )  # fmt: skip
    rows = [replace(ran, name="ddp"), ran, ComparedView(name=name, failure=failure)]
    return ComparisonView(
        rows=rows, pending=[name], steps=8, warm_up=2, ranks=8, stamp="12:00:00", notes=[failure]
    )


def tuner_views() -> list[TunerView]:
    """A search for a batch size from its first frame to each of its ends."""
    return [
        search(state="planning", planned=(), capacity_bytes=None),
        search(trying=1, most=4096),
        search(1, trying=24),
        search(1, 23, 24, trying=22),
        search(1, 23, 24, 22, state="done", ended_by="25 would not fit"),
        search(1, 23, state="stopped", ended_by="you stopped it"),
        search(state="failed", ended_by="ValueError on rank 1"),
    ]


def tuned(name: str, why: str = "out of memory on rank 1") -> TunerView:
    """A table of strategies that all have one name."""
    rows = [replace(row, name=name) for row in tuned_rows(6)]
    said: dict[str, Any] = {"strategy": name, "ended_by": why, "notes": (why,)}
    probes = [probe(1), probe(25, why=why)]
    return search(state="done", probes=probes, pick=1, rows=rows, pending=[name], **said)


def planned(name: str, strategies: int = 1) -> PlanView:
    """A plan of strategies that all have one name."""
    one = view_of(memory_plan("full_shard"), stamp="12:00:00")
    assert one.timeline is not None
    rows = [replace(one.rows[0], name=name, phase=one.rows[0].phase, rank=1)] * strategies
    timeline = replace(one.timeline, strategy=name)
    return replace(one, model=name, card=name, rows=rows, timeline=timeline, notes=[name])


def hostile_panels(bad: str) -> list[str]:
    ranks = (gpu_rank(0, bad), gpu_rank(1, bad + "2"))
    model = placement([parameter(f"{bad}.{name}", (8, 8), 2) for name in "ab"], 2, notes=(bad,))
    where = [rank_status(rank, host=bad * (rank + 1), models=(bad,)) for rank in range(2)]
    lost = Whereabouts(line=1, source=bad, inner=bad, doing=bad, missing=(1,), seconds=9)
    table = WaitingView(places={0: lost, 1: Whereabouts(doing=bad)}, hint=bad)
    return [
        training.html(view(waiting=table)),
        training.html(view(ranks=ranks, message=bad, notes=(bad,), metrics={bad: 1.0})),
        comparison.html(compared(bad, bad)),
        plan.html(planned(bad)),
        tuner.html(tuned(bad, bad)),
        mosaic.html(model),
        status.html(where, stamp=bad),
        evaluation.html(evaluated(metrics={bad: 1.0}, rows={bad: 2}, notes=(bad,))),
    ]


def frames(world: int, *, gpu: bool) -> list[str]:
    """A run from its first frame to each of its ends."""
    ranks = tuple(map(gpu_rank if gpu else cpu_rank, range(world)))
    wide: dict[str, Any] = {"binds_metrics": True, "evaluates": True, "total_steps": 100_000}
    known = {
        **wide,
        "metrics": {"accuracy": 0.5},
        "evaluation": evaluation_record(),
        "ranks": ranks,
    }
    nothing: dict[str, Any] = {
        "ranks": unknown_ranks(world), "total_steps": None, "micro_batch_size": None,
        "samples_per_step": None, "binds_metrics": True, "evaluates": True,
    }  # fmt: skip
    views = [
        view("starting", world, **nothing),
        view("running", world, steps=0, **nothing),
        view("running", world, **history([3.0]), **known),
        view("running", world, **history([3.0] * 40 + [math.nan] * 40), **known),
        view("done", world, steps=99_999, **known),
        view("stopped", world, **known),
        view("failed", world, message="rank 1 raised " + "ValueError " * 30, **known),
    ]
    return [training.html(view) for view in views]


def shown(page: Page, panels: list[str], width: int) -> list[list[int]]:
    """Put panels on a page, and return height and width of each, and the width of the page."""
    page.set_viewport_size({"width": width, "height": 900})
    page.set_content(f"<body style='margin:8px;font:13px DejaVu Sans'>{''.join(panels)}</body>")
    measured: list[list[int]] = page.evaluate(
        "[...document.body.children].map(panel => [panel.offsetHeight, panel.offsetWidth, "
        "document.documentElement.scrollWidth])"
    )
    return measured


def test_every_frame_of_a_run_has_the_same_height(seen: Seen) -> None:
    assert len(seen.heights) == 10
    assert {run: heights for run, heights in seen.heights.items() if len(heights) > 1} == {}


def test_hostile_values_run_nothing_and_stay_on_the_page(seen: Seen) -> None:
    assert len(seen.boxes) == 32
    for width, (height, wide, needed) in seen.boxes:
        assert height < 2_000
        assert wide <= needed <= width
    assert [what for what in seen.happened if not what.startswith(("about:", "data:"))] == []


def test_comparisons_plans_and_tuners_are_seen_whole_on_a_narrow_page_too(
    seen: Seen,
) -> None:
    assert seen.cut_off == {width: [0, 0, 0] for width in WIDTHS}
