"""The panels: what they say, how large they get, that nothing in them can bite."""

from __future__ import annotations

import math
import re
from html.parser import HTMLParser
from typing import Any

import pytest

from fsdp_magic.core.placement import ParameterPlacement, Placement, shard_rows
from fsdp_magic.core.protocol import Failure
from fsdp_magic.core.telemetry import DeviceSample, MemorySample, RankStatus
from fsdp_magic.core.units import GIB, MIB
from fsdp_magic.panels import errors, mosaic, status, training
from fsdp_magic.panels.gauges import PARTS, Gauge, bar, parts_of, share, unit_of
from fsdp_magic.panels.loss_chart import LossHistory
from fsdp_magic.panels.module_rows import module_rows, rank_groups
from fsdp_magic.panels.parts import (
    GREEN,
    ORANGE,
    RED,
    SMALL,
    figure_text,
    memory_unit,
    muted,
    plain,
)
from fsdp_magic.panels.training import RankView, TrainingView

HOSTILE = "<img src=x onerror=alert(1)>\"'&\x1b[2J\n</details></table>"
STATES = ("starting", "running", "done", "stopped", "failed")
ALLOWED_TAGS = {
    *("div", "span", "b", "table", "thead", "tbody", "tr", "th", "td"),
    *("pre", "img", "details", "summary"),
}
SVG_TAGS = {"svg", "title", "path"}
ALLOWED_ATTRIBUTES = {"style", "title", "role", "scope", "alt", "src", "open"}


# ---------------------------------------------------------------- records


def memory(activations: float = 10.0, **changes: Any) -> MemorySample:
    """80 GiB device: 6 + 6 + 24 GiB of states, activations, 2 GiB cache, 1 GiB other."""
    allocated = 36 + activations
    values: dict[str, Any] = {
        "allocated_bytes": int(allocated * GIB),
        "reserved_bytes": int((allocated + 2) * GIB),
        "used_bytes": int((allocated + 3) * GIB),
        "capacity_bytes": 80 * GIB,
        "peak_allocated_bytes": int((allocated + 5) * GIB),
        "parameter_bytes": 6 * GIB,
        "gradient_bytes": 6 * GIB,
        "optimizer_bytes": 24 * GIB,
    }
    return MemorySample(**(values | changes))


def gpu_rank(rank: int, device_name: str = "NVIDIA H100") -> RankView:
    return RankView(
        rank=rank,
        device_name=device_name,
        memory=memory(10 + rank % 7),
        peak_memory=memory(20 + rank % 7),
        activity=DeviceSample(utilisation_percent=93, temperature_celsius=61, power_watts=512),
        mean_activity=DeviceSample(utilisation_percent=88, temperature_celsius=59, power_watts=480),
    )


def cpu_rank(rank: int) -> RankView:
    small = MemorySample(
        allocated_bytes=100 * MIB,
        reserved_bytes=120 * MIB,
        used_bytes=150 * MIB,
        capacity_bytes=None,
        peak_allocated_bytes=140 * MIB,
    )
    return RankView(rank=rank, device_name="cpu", memory=small, peak_memory=small)


def view(state: Any = "running", world: int = 2, **changes: Any) -> TrainingView:
    steps = changes.get("steps", 0 if state == "starting" else 50)
    values: dict[str, Any] = {
        "state": state,
        "steps": steps,
        "total_steps": 100,
        "micro_batch_size": 8,
        "accumulate": 4,
        "data_parallel_size": world,
        "samples_per_step": 32 * world,
        "losses": [3.0 - 0.01 * step for step in range(steps)],
        "grad_norm": 0.532 if steps else None,
        "samples_per_second": 128.0 if steps else None,
        "tokens_per_second": 65_536.0 if steps else None,
        "seconds": 0.5 * steps,
        "eta_seconds": 75.0 if steps else None,
        "ranks": tuple(gpu_rank(rank) for rank in range(world)),
        "stamp": "14:03:22",
    }
    return TrainingView(**(values | changes))


def parameter(
    name: str, shape: tuple[int, ...], world: int, kind: Any = "sharded", dtype: str = "float32"
) -> ParameterPlacement:
    whole = kind == "replicated"
    local = tuple(
        shape if whole else (shard_rows(rows=shape[0], world_size=world, rank=r), *shape[1:])
        for r in range(world)
    )
    return ParameterPlacement(
        name=name,
        shape=shape,
        local_shapes=local,
        dtype=dtype,
        element_bytes=4,
        kind=kind,
        unit="",
    )


def placement(
    parameters: list[ParameterPlacement], world: int, notes: tuple[str, ...] = ()
) -> Placement:
    return Placement(
        model="model",
        strategy="full_shard",
        world_size=world,
        parameters=tuple(parameters),
        notes=notes,
    )


def gpt2_xl(world: int) -> Placement:
    """580 tensors in GPT-2 XL's shapes."""
    width, block = 1600, "transformer.h.{}."
    shapes = {
        "ln_1.weight": (width,),
        "ln_1.bias": (width,),
        "attn.c_attn.weight": (width, 3 * width),
        "attn.c_attn.bias": (3 * width,),
        "attn.c_proj.weight": (width, width),
        "attn.c_proj.bias": (width,),
        "ln_2.weight": (width,),
        "ln_2.bias": (width,),
        "mlp.c_fc.weight": (width, 4 * width),
        "mlp.c_fc.bias": (4 * width,),
        "mlp.c_proj.weight": (4 * width, width),
        "mlp.c_proj.bias": (width,),
    }
    named = [("transformer.wte.weight", (50257, width)), ("transformer.wpe.weight", (1024, width))]
    for number in range(48):
        named += [(block.format(number) + name, shape) for name, shape in shapes.items()]
    named += [("transformer.ln_f.weight", (width,)), ("transformer.ln_f.bias", (width,))]
    return placement([parameter(name, shape, world) for name, shape in named], world)


def rank_status(rank: int, **changes: Any) -> RankStatus:
    values: dict[str, Any] = {
        "rank": rank,
        "local_rank": rank,
        "host": "node-a",
        "pid": 4000 + rank,
        "device": f"cuda:{rank}",
        "device_name": "NVIDIA H100",
        "memory": memory(),
        "models": ("model",),
        "steps": 640,
    }
    return RankStatus(**(values | changes))


def failure(**changes: Any) -> Failure:
    values: dict[str, Any] = {
        "kind": "raised",
        "exception_type": "ValueError",
        "message": "target size (8)",
        "traceback": 'File cell 4, line 3\n----> 3 loss = f(out, batch["labels"])',
        "notes": ("step 7 was rolled back",),
    }
    return Failure(**(values | changes))


# ---------------------------------------------------------------- reading HTML


class Page(HTMLParser):
    """What a browser would see: tags, attributes, text; refuses what is not well formed."""

    def __init__(self, source: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.open: list[str] = []
        self.words: list[str] = []
        self.feed(source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))
        self.words += [" "] * (tag in ("div", "tr", "td", "th", "details", "summary"))
        if tag != "img":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join("".join(self.words).split())

    def all(self, tag: str) -> list[dict[str, str]]:
        return [attributes for name, attributes in self.tags if name == tag]


def assert_harmless(source: str) -> None:
    """Only elements and attributes that survive in a notebook that is not trusted."""
    page = Page(source)
    for tag, attributes in page.tags:
        assert tag in ALLOWED_TAGS | SVG_TAGS
        if tag in SVG_TAGS:
            continue
        for name, value in attributes.items():
            assert name in ALLOWED_ATTRIBUTES or name.startswith("aria-")
            assert name != "src" or value.startswith("data:image/svg+xml;base64,")
            assert name != "style" or "url(" not in value
    assert "\x1b" not in source


def numbers(text: str) -> set[str]:
    return set(re.findall(r"\d[\d,.]*\d|\d", text))


# ---------------------------------------------------------------- gauges


@pytest.mark.parametrize(
    "sample",
    [
        memory(),
        memory(reserved_bytes=90 * GIB),
        memory(parameter_bytes=70 * GIB),
        memory(allocated_bytes=0, reserved_bytes=0),
        memory(used_bytes=0),
    ],
)
def test_the_parts_of_a_bar_add_up_to_used(sample: MemorySample) -> None:
    parts = parts_of(sample)
    assert sum(parts) == sample.used_bytes
    assert min(parts) >= 0


def test_the_parts_of_a_bar_are_what_they_are_called() -> None:
    assert [size // GIB for size in parts_of(memory(10))] == [6, 6, 24, 10, 2, 1]


def test_the_boxes_of_a_bar_are_as_long_as_its_parts() -> None:
    gauge = Gauge(rank=0, device_name="", memory=memory(10), peak_bytes=60 * GIB)
    page = Page(bar(gauge, unit=unit_of([gauge]), largest=1))
    widths = [
        float(found[1])
        for attributes in page.all("span")
        if (found := re.match(r"width:([\d.]+)%", attributes.get("style", "")))
    ]
    assert widths == pytest.approx([100 * part / 80 for part in (6, 6, 24, 10, 2, 1)], abs=0.01)
    assert "left:75.00%" in bar(gauge, unit=unit_of([gauge]), largest=1)


def test_without_a_capacity_a_full_bar_is_the_largest_peak() -> None:
    gauge = Gauge(
        rank=0, device_name="", memory=memory(10, capacity_bytes=None), peak_bytes=60 * GIB
    )
    assert share(gauge, 60 * GIB, 60 * GIB) == 1.0
    assert share(gauge, 30 * GIB, 60 * GIB) == 0.5


def test_a_device_that_would_leave_every_bar_empty_is_no_measure_and_that_is_said() -> None:
    sample = memory(used_bytes=150 * MIB, capacity_bytes=12 * GIB)
    frame = view("done", ranks=(RankView(rank=0, device_name="", memory=None, peak_memory=sample),))
    for shown in (Page(training.html(frame)).text, training.text(frame)):
        assert "full bar 192 MiB" in shown
        assert "12.0 GiB" in shown
    half_full = memory(used_bytes=6 * GIB, capacity_bytes=12 * GIB)
    rank = RankView(rank=0, device_name="", memory=None, peak_memory=half_full)
    assert "full bar" not in training.text(view("done", ranks=(rank,)))


@pytest.mark.parametrize(
    ("largest", "count", "expected"),
    [
        (80 * GIB, 3 * GIB // 2, "1.5 GiB"),
        (2 * GIB, 100 * MIB, "0.10 GiB"),
        (500 * MIB, 100 * MIB, "100 MiB"),
        (None, None, "n/a GiB"),
    ],
)
def test_a_panel_has_one_unit(largest: int | None, count: int | None, expected: str) -> None:
    unit = memory_unit([largest, 1])
    if largest is None:
        unit = memory_unit([None])
    assert f"{unit.text(count)} {unit.name}" == expected


def test_a_rank_that_is_nearly_full_is_marked_but_not_for_its_cache() -> None:
    full, cached = memory(40), memory(10, reserved_bytes=78 * GIB, used_bytes=79 * GIB)
    marked = training.html(view(world=1, ranks_=None) if False else _one_rank(full))
    assert "▲" in marked
    assert "of the capacity at the peak" in marked
    calm = training.html(_one_rank(cached))
    assert "▲" not in calm
    assert "△" not in calm


def _one_rank(sample: MemorySample) -> TrainingView:
    rank = RankView(rank=0, device_name="gpu", memory=sample, peak_memory=sample)
    return view(world=1, ranks=(rank,))


# ---------------------------------------------------------------- training


@pytest.mark.parametrize("ranks", [1, 2, 8, 16, 64])
@pytest.mark.parametrize("state", STATES)
def test_a_frame_is_well_formed_and_harmless(state: str, ranks: int) -> None:
    assert_harmless(training.html(view(state, ranks)))
    assert training.text(view(state, ranks))


@pytest.mark.parametrize(
    ("state", "sign", "word"),
    [
        ("starting", "○", "Starting"),
        ("running", "●", "Running"),
        ("done", "✓", "Done"),
        ("stopped", "■", "Stopped"),
        ("failed", "✕", "Failed"),
    ],
)
def test_states_differ_in_sign_word_and_colour(state: Any, sign: str, word: str) -> None:
    shown = Page(training.html(view(state))).text
    assert shown.startswith(f"{sign} {word}")
    assert training.text(view(state)).startswith(f"{sign} {word}")
    assert len({colour for _, _, colour in training.STATES.values()}) == len(STATES)
    assert training.STATES["failed"][2] == RED
    assert training.STATES["stopped"][2] == ORANGE
    assert training.STATES["done"][2] == GREEN


def test_the_head_says_where_the_run_is() -> None:
    for shown in (Page(training.html(view())).text, training.text(view())):
        assert "8 × 4 × 2 ranks = 64 samples a step" in shown
        for words in (
            "50 %",
            "step 50/100",
            "loss 2.510",
            "gradient norm 0.532",
            "tokens/s 65.5k",
            "ms/step 500",
            "elapsed 00:25",
            "ETA 01:15",
            "14:03:22",
        ):
            assert words in shown


def test_a_later_run_counts_on() -> None:
    assert "step 250/300" in training.text(view(first_step=200))
    assert "step 250/300" in Page(training.html(view(first_step=200))).text


def test_samples_per_second_stand_in_where_there_are_no_tokens() -> None:
    shown = training.text(view(tokens_per_second=None))
    assert "samples/s 128" in shown
    assert "tokens/s" not in shown


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"data_parallel_size": 1, "samples_per_step": 32}, "8 × 4 × 1 rank = 32 samples a step"),
        ({"samples_per_step": None}, "8 × 4 × 2 ranks = 64 samples a step"),
        ({"samples_per_step": 60}, "8 × 4 × 2 ranks, 60 samples a step"),
        ({"micro_batch_size": None, "samples_per_step": None}, "2 ranks, samples a step n/a"),
    ],
)
def test_the_batch_is_put_in_words(changes: dict[str, Any], expected: str) -> None:
    assert training.batch_text(view(**changes)) == expected


def test_unknown_numbers_read_na() -> None:
    unknown = view(
        "starting",
        total_steps=None,
        ranks=tuple(
            RankView(rank=r, device_name="gpu", memory=None, peak_memory=None) for r in range(2)
        ),
    )
    for shown in (Page(training.html(unknown)).text, training.text(unknown)):
        for words in ("step 0/n/a", "loss n/a", "ms/step n/a", "ETA n/a", "peak used n/a"):
            assert words in shown
        assert "None" not in shown
        assert "nan" not in shown
    rows = [line for line in training.text(unknown).splitlines() if line.startswith(("0 ", "1 "))]
    assert [line.split()[-3:] for line in rows] == [["n/a"] * 3] * 2


def test_a_rank_without_capacity_reads_na() -> None:
    shown = training.text(view(ranks=(cpu_rank(0), cpu_rank(1))))
    assert "memory, MiB" in shown
    assert re.search(r"^0 .*\b150\s+150\s+n/a$", shown, re.MULTILINE)


def test_columns_that_no_rank_knows_are_left_out() -> None:
    cpu = Page(training.html(view(ranks=(cpu_rank(0), cpu_rank(1))))).text
    assert not any(name in cpu for name in ("util", "°C", " W "))
    mixed = Page(training.html(view(ranks=(gpu_rank(0), cpu_rank(1))))).text
    assert "util °C W" in mixed
    assert mixed.count("93 %") == 1
    assert "n/a n/a n/a" in mixed


def test_the_last_frame_shows_the_peak_and_means() -> None:
    rank = gpu_rank(0)
    running = Page(training.html(view(ranks=(rank,)))).text
    done = Page(training.html(view("done", ranks=(rank,)))).text
    assert "activations 10.0" in running
    assert "93 %" in running
    assert "activations 20.0" in done
    assert "used at peak" in done
    assert "mean util" in done
    assert "mean util" not in running
    assert "position:absolute" in training.html(view(ranks=(rank,)))
    assert "position:absolute" not in training.html(view("done", ranks=(rank,)))
    assert "88 %" in done
    assert "93 %" not in done


@pytest.mark.parametrize("state", ["done", "stopped", "failed"])
def test_the_chart_of_the_last_frame_is_an_image_in_words_too(state: Any) -> None:
    page = Page(training.html(view(state)))
    assert not page.all("svg")
    (image,) = page.all("img")
    assert image["alt"].startswith("Loss over 50 steps: first 3.000, lowest 2.510")


def test_the_text_has_the_numbers_of_the_page() -> None:
    for state in STATES:
        frame = view(state)
        page = Page(training.html(frame))
        shown = re.sub(r"parameters [\d.]+, .*? GiB", "", page.text)
        assert numbers(shown) - numbers(training.text(frame)) == set()


@pytest.mark.parametrize("ranks", [2, 8, 16])
def test_frames_of_a_run_have_the_same_rows(ranks: int) -> None:
    empty = tuple(
        RankView(rank=r, device_name="NVIDIA H100", memory=None, peak_memory=None)
        for r in range(ranks)
    )
    frames = [
        view("starting", ranks, ranks=empty),
        view("running", ranks, steps=1),
        view("running", ranks, steps=50, losses=[math.nan] * 50),
        view("running", ranks, steps=99),
        view("stopped", ranks, steps=99, message="Stopped by you after step 99."),
    ]
    pages = [Page(training.html(frame)) for frame in frames]
    assert {len(page.all("tr")) for page in pages} == {1 + min(ranks, 3 if ranks >= 16 else ranks)}
    assert len({_heights(page) for page in pages}) == 1
    assert len({len(training.text(frame).splitlines()) for frame in frames}) == 1


def _heights(page: Page) -> tuple[str, ...]:
    """The heights that blocks reserve, the chart's own insides left out."""
    chart = ("svg", "img", "path", "title")
    styles = [
        a.get("style", "") for tag, a in page.tags if tag in ("div", "td") and tag not in chart
    ]
    reserved = [s for s in styles if re.search(r"(?<![-\w])(?:min-)?height:(?!80px)", s)]
    return tuple(re.findall(r"(?<![-\w])(?:min-)?height:\d+px", " ".join(reserved)))


def test_losses_that_are_not_finite_leave_a_gap_and_are_named() -> None:
    losses = [3.0] * 20 + [math.nan] * 10 + [2.0] * 10 + [math.inf] + [1.0] * 9
    source = training.html(view(losses=losses, first_step=200))
    path = next(a["d"] for a in Page(source).all("path") if a.get("stroke-width") == "2")
    assert path.count("M") == 3
    assert "nan" not in path
    assert "inf" not in path
    for shown in (Page(source).text, training.text(view(losses=losses, first_step=200))):
        assert "loss first not finite at step 221" in shown


@pytest.mark.parametrize(
    "losses",
    [
        [math.nan],
        [math.nan, math.inf, -math.inf],
        [1.0],
        [0.0, 0.0],
        [1e308, -1e308, 1e308],
        [5.0, 5.0, 5.0],
        [1.0, math.nan],
    ],
)
@pytest.mark.parametrize("state", ["running", "done"])
def test_odd_losses_are_drawn(losses: list[float], state: Any) -> None:
    frame = view(state, steps=len(losses), losses=losses)
    assert_harmless(training.html(frame))
    for attributes in Page(training.html(frame)).all("path"):
        assert re.fullmatch(r"[MLHVh\d. -]*", attributes["d"])
    assert figure_text(losses[-1]) in training.text(frame)


def test_one_wild_loss_does_not_flatten_the_rest() -> None:
    losses = [1e9] + [3.0 - 0.01 * step for step in range(99)]
    path = Page(training.html(view(losses=losses, steps=100))).all("path")[-2]["d"]
    heights = [float(value) for value in re.findall(r"[ML][\d.]+ ([\d.]+)", path)]
    assert max(heights[1:]) - min(heights[1:]) > 20


def test_step_numbers_count_as_the_panel_does() -> None:
    history = LossHistory(losses=[1.0, math.nan], first_step=10, total_steps=None)
    assert history.first_non_finite == 12


@pytest.mark.parametrize("state", ["running", "done"])
def test_a_training_panel_stays_small(state: Any) -> None:
    wave = [3 + math.sin(step / 700) + math.sin(step) / 5 for step in range(10_000)]
    frame = view(state, world=8, steps=10_000, total_steps=10_000, losses=wave)
    assert len(training.html(frame).encode()) <= 30_000
    assert len(training.text(frame)) < 3_000


def test_many_ranks_are_three_and_a_strip() -> None:
    frame = view(world=64)
    page = Page(training.html(frame))
    assert len(page.all("tr")) == 4
    for words in ("worst", "median", "best"):
        assert words in page.text
        assert words in training.text(frame)
    assert sum(a.get("title", "").startswith("rank ") for a in page.all("span")) == 64
    assert len(max(training.text(frame).splitlines(), key=lambda line: line.count("▅"))) <= 120
    assert "6 worst" in page.text


def test_fifteen_ranks_are_fifteen_rows() -> None:
    assert len(Page(training.html(view(world=15))).all("tr")) == 16


def test_the_message_and_the_notes_are_there() -> None:
    frame = view("failed", message="rank 1 raised ValueError", notes=("was put in train()",))
    for shown in (Page(training.html(frame)).text, training.text(frame)):
        assert "rank 1 raised ValueError" in shown
        assert "was put in train()" in shown


# ---------------------------------------------------------------- mosaic


def test_equal_consecutive_blocks_fold() -> None:
    rows = module_rows(gpt2_xl(2).parameters)
    assert [(row.name, row.blocks) for row in rows] == [
        ("transformer.wte", 1),
        ("transformer.wpe", 1),
        ("transformer.h.{0…47}", 48),
        ("transformer.ln_f", 1),
    ]
    for shown in (Page(mosaic.html(gpt2_xl(2))).text, mosaic.text(gpt2_xl(2))):
        assert "transformer.h.{0…47} ×48" in shown


def test_blocks_that_differ_do_not_fold() -> None:
    same, wider = (4, 4), (4, 8)
    named = [("h.0.w", same), ("h.1.w", same), ("h.2.w", wider), ("h.3.w", same), ("n.4.w", same)]
    rows = module_rows([parameter(name, shape, 2) for name, shape in named])
    assert [row.name for row in rows] == ["h.{0…1}", "h.2", "h.3", "n.4"]


def test_blocks_with_gaps_are_listed() -> None:
    named = [parameter(f"{number}.weight", (4, 4), 2) for number in (0, 2, 4)]
    (row,) = module_rows(named)
    assert row.name == "{0,2,4}"


def test_a_replicated_block_does_not_fold_with_a_sharded_one() -> None:
    rows = module_rows(
        [parameter("h.0.w", (4,), 1), parameter("h.1.w", (4,), 1, kind="replicated")]
    )
    assert len(rows) == 2


def test_the_rows_hold_all_bytes() -> None:
    model = gpt2_xl(8)
    rows = module_rows(model.parameters)
    held = [sum(sum(row.held[rank]) for row in rows) for rank in range(8)]
    assert held == list(model.local_bytes)


@pytest.mark.parametrize("world", [1, 2, 8, 15, 16, 64])
def test_the_mosaic_of_a_large_model_stays_small(world: int) -> None:
    many = [parameter(f"part.layer_{i}.{'x' * 300}", (64 + i, 128), world) for i in range(580)]
    pairs = [
        parameter(f"layer_{i}.{name}", (64 + i, 128), world)
        for i in range(290)
        for name in ("weight", "bias")
    ]
    for model in (gpt2_xl(world), placement(many, world), placement(pairs, world)):
        source = mosaic.html(model)
        assert len(source.encode()) <= 50_000
        assert_harmless(source)
        assert len(mosaic.text(model)) < 12_000


def test_what_has_no_room_is_said_with_its_sum() -> None:
    many = [parameter(f"layer_{i}_{'x' * 80}.w", (64 + i, 128), 8) for i in range(580)]
    shown = Page(mosaic.html(placement(many, 8))).text
    rows = len(Page(mosaic.html(placement(many, 8))).all("tr")) - 3
    assert f"… {580 - rows} more modules" in shown
    assert "more modules" in mosaic.text(placement(many, 8))


def test_every_distinct_group_opens_to_its_tensors() -> None:
    page = Page(mosaic.html(gpt2_xl(8)))
    assert len(page.all("details")) == 2
    assert "12 tensors in each of 48 equal blocks" in page.text
    assert "more tensors are not opened" not in page.text
    assert "attn.c_attn.weight 1600×4800" in page.text


def test_tooltips_say_name_shapes_dtype_and_placement() -> None:
    titles = [a.get("title", "") for a in Page(mosaic.html(gpt2_xl(8))).all("td")]
    expected = "transformer.h.{0…47}.attn.c_attn.weight 1600×4800\nrank 3: 200×4800 float32 sharded"
    assert expected in titles
    assert "transformer.wte.weight 50257×1600\nrank 7: 6276×1600 float32 sharded" in titles


def test_sharded_and_replicated_look_different() -> None:
    model = placement(
        [parameter("a.w", (8, 8), 2), parameter("b.w", (8, 8), 2, kind="replicated")], 2
    )
    page = Page(mosaic.html(model))
    assert "sharded" in page.text
    assert "replicated" in page.text
    bars = [a["style"] for a in page.all("div") if a.get("style", "").startswith("height:9px")]
    assert len({style.split("%;")[-1] for style in bars}) == 2
    assert "▇" in mosaic.text(model)
    assert "▒" in mosaic.text(model)


def test_a_rank_that_holds_nothing_has_a_dash() -> None:
    model = placement([parameter("head.weight", (1, 64), 2)], 2)
    assert "– none on this rank" in Page(mosaic.html(model)).text
    assert re.search(r"head.weight\s+▇+\s+–\s+256 B", mosaic.text(model))


def test_totals_are_there() -> None:
    model = gpt2_xl(2)
    for shown in (Page(mosaic.html(model)).text, mosaic.text(model)):
        assert re.search(r"total\s+2.9 GiB\s+2.9 GiB\s+5.8 GiB", shown)
        assert "580 tensors" in shown


def test_many_ranks_share_columns() -> None:
    groups = rank_groups(gpt2_xl(64).parameters, 64)
    assert groups == [range(63), range(63, 64)]
    for shown in (Page(mosaic.html(gpt2_xl(64))).text, mosaic.text(gpt2_xl(64))):
        assert "ranks 0-62" in shown
        assert "rank 63" in shown


def test_ranks_without_a_column_are_named() -> None:
    model = placement([parameter(f"layer_{i}.w", (i + 3, 1000), 64) for i in range(60)], 64)
    for shown in (Page(mosaic.html(model)).text, mosaic.text(model)):
        assert "ranks 9-61 differ and are not shown" in shown
    assert "not shown" not in mosaic.text(gpt2_xl(64))


def test_an_empty_model_is_shown() -> None:
    assert "0 tensors" in Page(mosaic.html(placement([], 2))).text
    assert "0 tensors" in mosaic.text(placement([], 2))


def test_notes_stand_beneath() -> None:
    model = placement([parameter("a.w", (8, 8), 2)], 2, notes=("wte is tied to lm_head",))
    assert Page(mosaic.html(model)).text.endswith("wte is tied to lm_head")
    assert mosaic.text(model).endswith("wte is tied to lm_head")


# ---------------------------------------------------------------- status


def test_status_says_where_each_rank_is() -> None:
    ranks = [rank_status(0), rank_status(1, models=("a", 'nets["G"]'))]
    for shown in (
        Page(status.html(ranks, stamp="14:03")).text,
        status.text(ranks, stamp="14:03"),
    ):
        for words in ("2 ranks", "14:03", "node-a", "4001", "cuda:1", "NVIDIA H100"):
            assert words in shown
        for words in ("49.0", "51.0", "80.0", 'a, nets["G"]', "640", "peak allocated"):
            assert words in shown


def test_status_takes_a_heading() -> None:
    shown = status.html([rank_status(0)], stamp="", heading="1 rank on node-a, gloo")
    assert Page(shown).text.startswith("1 rank on node-a, gloo")
    assert status.text([rank_status(0)], stamp="", heading="1 rank on node-a").startswith("1 rank")


def test_status_of_what_is_not_known() -> None:
    unknown = rank_status(0, memory=memory(capacity_bytes=None), models=(), device_name="")
    shown = status.text([unknown], stamp="")
    assert shown.count("n/a") == 2
    assert Page(status.html([unknown], stamp="")).text.count("n/a") == 2


@pytest.mark.parametrize("ranks", [1, 2, 8, 16, 64])
def test_status_has_a_row_per_rank(ranks: int) -> None:
    source = status.html([rank_status(rank) for rank in range(ranks)], stamp="")
    assert_harmless(source)
    assert len(Page(source).all("tr")) == ranks + 1


# ---------------------------------------------------------------- errors


def test_equal_tracebacks_are_shown_once_with_their_ranks() -> None:
    other = failure(exception_type="KeyError", message="'labels'", traceback="")
    exceptions = {3: failure(), 0: failure(), 1: failure(), 2: failure(), 5: other}
    text = errors.text(exceptions, released=(4, 6, 7))
    assert text.startswith("ranks 0-3 raised ValueError\nFile cell 4, line 3\n")
    assert text.count("File cell 4") == 1
    assert "ValueError: target size (8)\nstep 7 was rolled back\n" in text
    assert "rank 5 raised KeyError\nKeyError: 'labels'" in text
    assert text.endswith("ranks 4,6-7 released, because a peer failed")
    shown = Page(errors.html(exceptions, released=(4, 6, 7))).text
    for words in ("ranks 0-3 raised ValueError", "ValueError: target size (8)", "rank 5 raised"):
        assert words in shown
    assert shown.count("File cell 4") == 1
    assert shown.endswith("ranks 4,6-7 released, because a peer failed")


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("out_of_memory", "rank 1 out of memory"),
        ("interrupted", "rank 1 interrupted"),
        ("usage", "rank 1 refused the cell before it ran"),
    ],
)
def test_each_kind_of_failure_has_its_words(kind: Any, expected: str) -> None:
    assert errors.text({1: failure(kind=kind)}).startswith(expected)
    assert expected in Page(errors.html({1: failure(kind=kind)})).text


def test_a_failure_without_message_ends_in_its_type() -> None:
    text = errors.text({0: failure(message="", traceback="", notes=())})
    assert text == "rank 0 raised ValueError\nValueError"


# ---------------------------------------------------------------- hostile values


def _hostile_panels() -> dict[str, tuple[str, str]]:
    rank = gpu_rank(0, HOSTILE)
    other = gpu_rank(1, HOSTILE + "2")
    frame = view(ranks=(rank, other), message=HOSTILE, notes=(HOSTILE,), stamp=HOSTILE)
    last = view("failed", ranks=(rank, rank), message=HOSTILE, notes=(HOSTILE,), stamp=HOSTILE)
    model = Placement(
        model=HOSTILE,
        strategy=HOSTILE,
        world_size=2,
        parameters=(
            parameter(HOSTILE, (8, 8), 2, dtype=HOSTILE),
            parameter(f"{HOSTILE}.0.{HOSTILE}", (8, 8), 2, dtype=HOSTILE),
            parameter(f"{HOSTILE}.0.{HOSTILE}2", (8, 8), 2, dtype=HOSTILE),
        ),
        notes=(HOSTILE,),
    )
    where = rank_status(
        0, host=HOSTILE, device=HOSTILE, device_name=HOSTILE, models=(HOSTILE, HOSTILE)
    )
    failed = {
        0: failure(exception_type=HOSTILE, message=HOSTILE, traceback=HOSTILE, notes=(HOSTILE,))
    }
    heading = {"stamp": HOSTILE, "heading": HOSTILE}
    return {
        "running": (training.html(frame), training.text(frame)),
        "last": (training.html(last), training.text(last)),
        "mosaic": (mosaic.html(model), mosaic.text(model)),
        "status": (status.html([where], **heading), status.text([where], **heading)),
        "errors": (errors.html(failed), errors.text(failed)),
    }


@pytest.mark.parametrize("panel", ["running", "last", "mosaic", "status", "errors"])
def test_hostile_values_mean_only_themselves(panel: str) -> None:
    source, text = _hostile_panels()[panel]
    assert_harmless(source)
    assert "<img src=x" not in source
    assert "<img src=x onerror=alert(1)>" in Page(source).text
    assert "\x1b" not in text
    if panel != "errors":
        assert not [line for line in text.splitlines() if line.startswith("</details>")]


def test_control_characters_are_taken_out() -> None:
    assert plain("a\x1b[31mred\x1b[0m\x1b]0;title\x07b\r\nc\x00\u202e") == "aredb\nc\ufffd\ufffd"


# ---------------------------------------------------------------- colours


def _luminance(red: float, green: float, blue: float) -> float:
    linear = [
        value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4
        for value in (red, green, blue)
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _contrast(colour: str, page: str) -> float:
    def luminance(code: str) -> float:
        red, green, blue = (int(code[start : start + 2], 16) / 255 for start in (1, 3, 5))
        return _luminance(red, green, blue)

    low, high = sorted((luminance(colour), luminance(page)))
    return (high + 0.05) / (low + 0.05)


def test_colours_stand_out_on_white_and_on_black() -> None:
    colours = {colour for _, _, colour in training.STATES.values()}
    for part in PARTS:
        colours.update(re.findall(r"#[0-9A-Fa-f]{6}", part.style))
    assert len(colours) >= 9
    for colour in colours:
        assert _contrast(colour, "#FFFFFF") >= 3
        assert _contrast(colour, "#111111") >= 3


def test_muted_text_can_be_read_on_white_and_on_black() -> None:
    # On text of .87 opacity, which JupyterLab sets.
    found = [re.search(r"opacity:([.\d]+)", style) for style in (muted(""), SMALL)]
    shade = 0.87 * min(float(match[1]) for match in found if match)
    on_white = f"#{round(255 * (1 - shade)):02X}" + 2 * f"{round(255 * (1 - shade)):02X}"
    on_black = f"#{round(17 + 238 * shade):02X}" + 2 * f"{round(17 + 238 * shade):02X}"
    assert _contrast(on_white, "#FFFFFF") >= 4.5
    assert _contrast(on_black, "#111111") >= 4.5
