"""The plan's panel: its table, its picture and what to change; as HTML and as text."""

from __future__ import annotations

import base64
import json
import re
from dataclasses import replace
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from panel_records import HOSTILE, Page, assert_harmless
from plan_records import device, memory_plan, strategy_plan

from fsdp_magic.core.errors import UsageError
from fsdp_magic.core.planning.cards import find_card
from fsdp_magic.core.planning.memory_plan import Interval
from fsdp_magic.core.planning.timeline import KINDS
from fsdp_magic.core.units import GIB, MIB
from fsdp_magic.panels import plan as panel
from fsdp_magic.panels import plan_terms, timeline_picture
from fsdp_magic.panels.memory_kinds import MEMORY_KINDS
from fsdp_magic.panels.plan_view import PlanView, view_of

SIX = ("ddp", "zero1", "hybrid_shard:2", "shard_grad_op", "full_shard", "full_shard+cpu_offload")


def view(*names: str, **changes: object) -> PlanView:
    plan = memory_plan(*names, world_size=4)
    return replace(view_of(plan, stamp="12:00:00"), **changes)  # type: ignore[arg-type]


def picture(source: str) -> ElementTree.Element:
    """Return the drawing in a panel, parsed."""
    address = Page(source).all("img")[0]["src"]
    return ElementTree.fromstring(base64.b64decode(address.partition(",")[2]))


def test_every_strategy_has_a_row_with_its_largest_micro_batch() -> None:
    plan = memory_plan(*SIX, world_size=4)
    source, text = panel.html(view_of(plan)), panel.text(view_of(plan))
    for name, largest in plan.max_micro_batch_size.items():
        assert re.search(rf"^{re.escape(name)} +{largest}\b", text, re.MULTILINE)
        assert f"<b>{largest}</b>" in source
    assert len(Page(source).all("tr")) == 1 + len(SIX)


@pytest.mark.parametrize(
    ("largest", "shown"),
    [
        (Interval(safe=5, ideal=6), "5 to 6"),
        (Interval(safe=6, ideal=6), "6"),
        (Interval(safe=0, ideal=1), "0 to 1"),
        (Interval(safe=0, ideal=0), "none"),
        (Interval(safe=117_760, ideal=118_134), "117,760 to 118,134"),
        (Interval(safe=1 << 20, ideal=1 << 20), "1,048,576 or more"),
    ],
)
def test_the_largest_micro_batch_is_an_interval(largest: Interval, shown: str) -> None:
    one = view("ddp")
    one = replace(one, rows=[replace(one.rows[0], largest=largest)])
    assert re.search(rf"^ddp +{shown}  ", panel.text(one), re.MULTILINE)
    assert f" {shown} " in Page(panel.html(one)).text


def test_a_strategy_without_a_plan_has_a_row_with_its_reason() -> None:
    one = view("ddp", untraced={"ddp+bf16": "ValueError: <no> bf16"})
    source = panel.html(one)
    assert "ddp+bf16: not planned: ValueError: <no> bf16" in panel.text(one)
    assert "not planned: ValueError: &lt;no&gt; bf16" in source
    assert len(Page(source).all("tr")) == 3
    plan = replace(memory_plan("ddp"), untraced={"ddp+bf16": "of bf16"})
    with pytest.raises(UsageError, match="was not planned: of bf16; planned: ddp"):
        plan["ddp+bf16"]


def test_what_a_sample_takes_is_never_shown_as_nothing() -> None:
    one = view("ddp", "full_shard")
    small, large = (
        replace(row, sample_bytes=size, peak_bytes=2 * GIB)
        for row, size in zip(one.rows, (192 * 1024, GIB), strict=True)
    )
    one = replace(one, rows=[small, large])
    assert "+&nbsp;192&nbsp;KiB" in panel.html(one)
    assert "+&nbsp;1.00<" in panel.html(one)
    assert re.search(r"^ddp +\d+.* 2\.00 +192 KiB ", panel.text(one), re.MULTILINE)


def test_the_parts_of_a_bar_take_the_room_of_their_bytes() -> None:
    one = view("ddp", usable_bytes=1024 * MIB)
    widths = [float(w) for w in re.findall(r'MiB" style="width:([0-9.]+)%', panel.html(one))]
    assert sum(widths) == pytest.approx(100 * one.rows[0].peak_bytes / (1024 * MIB), abs=0.1)


def test_bars_are_of_the_largest_size_that_every_strategy_that_fits_takes() -> None:
    names = ("ddp", "full_shard", "full_shard+cpu_offload")
    plan = memory_plan(*names, world_size=4, device=device(capacity_bytes=95 * MIB))
    none, least, most = plan.max_micro_batch_size.values()
    assert (none, least, most) == (0, 2, 3)
    shown = view_of(plan)
    assert shown.bar_size == least
    for row in shown.rows:
        assert row.peak_bytes == plan.peak_bytes(row.name, least)
        assert row.phase == plan[row.name].peak_phase(least)
    assert view_of(memory_plan(device=device(capacity_bytes=1 << 50))).bar_size == 1


def test_a_bar_that_does_not_fit_shows_where_memory_ends() -> None:
    assert "border-left:2px solid" not in panel.html(view("ddp", timeline=None))
    tight = view("ddp", timeline=None, usable_bytes=2 * MIB)
    assert "border-left:2px solid" in panel.html(tight)


def test_the_picture_shows_peak_limit_and_every_kind_there_is() -> None:
    source = panel.html(view("full_shard"))
    paths = picture(source).findall(".//{*}path")
    fills = {path.get("fill") for path in paths}
    assert {"#5C93E6", "#884D8C", "#00733D", "#BF8613", "url(#p)", "url(#t)"} <= fills
    words = Page(source).text
    for said in ("at the peak", "usable", "first step", "every later step", "forward", "backward"):
        assert said in words
    assert "memory of a rank over two steps, peak" in Page(source).all("img")[0]["alt"]


def test_the_picture_is_as_high_as_what_is_held() -> None:
    timeline = memory_plan().timeline("full_shard", 8)
    drawing = ElementTree.fromstring(
        timeline_picture.svg(timeline, top_bytes=2 * timeline.peak_bytes, limit_bytes=None)
    )
    fine = 4 * timeline_picture.HEIGHT
    bands = [p.get("d") or "" for p in drawing if (p.get("d") or "").endswith("z")]
    edges = [_upper_edge(_corners(band)) for band in bands]
    assert min(y for edge in edges for y in edge.values()) == fine / 2
    across = 4 * timeline_picture.WIDTH / (timeline.entries - 1)
    totals = {round(across * point.entry): point.total for point in timeline.points}
    drawn = [x for x in totals if any(x in edge for edge in edges)]
    assert len(drawn) > 50
    for x in drawn:
        height = fine * totals[x] / (2 * timeline.peak_bytes)
        assert fine - min(_between(edge, x) for edge in edges) == pytest.approx(height, abs=1.5)


def _upper_edge(corners: list[tuple[int, int]]) -> dict[int, int]:
    """Return y by x of a band's corners up to where it turns back."""
    turn = next(n for n, (a, b) in enumerate(pairwise(corners)) if b[0] <= a[0])
    return dict(corners[: turn + 1])


def _between(edge: dict[int, int], x: int) -> float:
    """Return the y of an edge at an x, on the line between its corners."""
    left, right = max(a for a in edge if a <= x), min(a for a in edge if a >= x)
    share = (x - left) / (right - left) if right > left else 0.0
    return edge[left] + share * (edge[right] - edge[left])


def _corners(data: str) -> list[tuple[int, int]]:
    """Return the corners of a band, in absolute figures."""
    corners: list[tuple[int, int]] = []
    x = y = 0
    for command, numbers in re.findall(r"([Ml])([-0-9 ]+)", data):
        first, second = map(int, re.findall(r"-?[0-9]+", numbers))
        x, y = (x + first, y + second) if command == "l" else (first, second)
        corners.append((x, y))
    return corners


def test_a_limit_far_above_is_said_instead_of_drawn() -> None:
    far = view("ddp", usable_bytes=1 << 50)
    assert "usable, far above" in Page(panel.html(far)).text
    assert "1.5" not in {
        p.get("stroke-width") for p in picture(panel.html(far)) if p.get("stroke") == "#D1342F"
    }


def test_panels_of_one_and_six_strategies_are_small() -> None:
    for names in (("full_shard",), SIX):
        assert len(panel.html(view(*names))) < 50_000


def test_every_kind_of_memory_has_one_look_and_letter() -> None:
    assert sorted(kind for each in MEMORY_KINDS for kind in each.kinds) == sorted(KINDS)
    assert len({each.style for each in MEMORY_KINDS}) == len(MEMORY_KINDS)
    assert len({each.letter for each in MEMORY_KINDS}) == len(MEMORY_KINDS)


@pytest.mark.parametrize("bad", [HOSTILE, "\x1b[31mred", "a\u202eb\u2028c", "W" * 10_000, "\ud800"])
def test_hostile_names_run_nothing_and_break_no_layout(bad: str) -> None:
    def shown(text: str) -> PlanView:
        made = view("ddp", model=text, device_name=text, notes=(text,), advice=[text], card=text)
        assert made.timeline is not None
        rows = [replace(made.rows[0], name=text, phase=text)]
        return replace(made, rows=rows, timeline=replace(made.timeline, strategy=text), stamp=text)

    source, text = panel.html(shown(bad)), panel.text(shown(bad))
    assert_harmless(source)
    assert Page(source).tree == Page(panel.html(shown("x"))).tree
    assert len(text.splitlines()) == len(panel.text(shown("x")).splitlines())
    for each in (source, text):
        assert not re.search("[\x1b\u202e\u2028\ud800]", each)
        assert len(each) < 50_000
        json.dumps(each, ensure_ascii=False).encode()


def test_nothing_is_ranked_without_a_card() -> None:
    assert "speed" not in panel.text(view("ddp"))
    ranked = replace(view("ddp"), card="T4")
    ranked = replace(ranked, rows=[replace(ranked.rows[0], rank=1)])
    assert " #1 " in panel.text(ranked)
    assert "it promises no seconds" in panel.text(ranked)


def test_a_card_without_bf16_is_told_where_a_strategy_computes_in_it() -> None:
    plans = {"ddp+bf16": strategy_plan("ddp", precision="bf16")}
    for name, words in (("T4", "T4 does not compute in bf16"), ("A10G", "")):
        one = memory_plan(strategies=plans, device=device(card=find_card(name, what="")))
        assert [note for note in view_of(one).notes if "bf16" in note] == (
            [f"{words}, and engines refuse it there: type fp16"] if words else []
        )


def test_terms_are_a_table_with_names_sizes_and_sources() -> None:
    plan = memory_plan("full_shard", device=device(context_bytes=MIB))
    source, text = plan_terms.html(plan, "full_shard"), plan_terms.text(plan, "full_shard")
    assert_harmless(source)
    for words in (Page(source).text, text):
        assert "usable by tensors" in words
        assert "torch.chunk" in words
        assert "peak, allocated" in words


def test_sizes_of_gib_and_of_mib_have_their_unit() -> None:
    assert "in MiB; " in panel.text(view("ddp"))
    large = view("ddp")
    large = replace(large, rows=[replace(large.rows[0], peak_bytes=9 * GIB)])
    assert "in GiB; " in panel.text(large)
