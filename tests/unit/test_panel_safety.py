"""All panels: nothing in them can bite, all of it can be read, every memory size has its name."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser
from typing import Any

import pytest
from panel_records import (
    HOSTILE,
    STATES,
    Page,
    assert_harmless,
    evaluated,
    evaluation_record,
    failure,
    gpt2_xl,
    gpu_rank,
    memory,
    one_rank,
    parameter,
    rank_status,
    unknown_ranks,
    view,
)
from tuner_records import probe, search, tuned_rows

from fsdp_magic.core.placement import Placement
from fsdp_magic.core.units import GIB
from fsdp_magic.core.whereabouts import Whereabouts
from fsdp_magic.panels import errors, evaluation, mosaic, status, training, tuner
from fsdp_magic.panels.gauges import PARTS
from fsdp_magic.panels.loss_history import LossHistory
from fsdp_magic.panels.parts import plain
from fsdp_magic.panels.waiting import WaitingView

# ---------------------------------------------------------------- hostile values

ANSI, BIDI, LONG = (
    "\x1b[31mred\x1b[0m\x1b]0;title\x07",
    "a\u202eb\u2066c\u200fd\u061ce",
    "W" * 10_000,
)
HOSTILE_VALUES = {
    "markup": HOSTILE,
    "ansi": ANSI,
    "bidi": BIDI,
    "lines": "one\ntwo\r\nthree\u2028four\x0bfive",
    "long": "W" * 10_000,
    "half a character": "\ud800",
}


def _panels(bad: str) -> dict[str, tuple[str, str]]:
    """Every panel with a value wherever text of a person's can stand."""
    ranks = (gpu_rank(0, bad), gpu_rank(1, bad + "2"))
    texts: dict[str, Any] = {"message": bad, "notes": (bad,), "stamp": bad, "metrics": {bad: 1.0}}
    newest = evaluation_record(metrics={bad: 0.5})
    where = Whereabouts(line=1, source=bad, inner=bad, doing=bad, missing=(1,), seconds=9.0)
    texts["waiting"] = WaitingView(places={0: where, 1: None}, hint=bad)
    frame = view(ranks=ranks, evaluates=True, evaluation=newest, **texts)
    last = view("failed", ranks=(ranks[0], ranks[0]), **texts)
    model = Placement(
        model=bad,
        strategy=bad,
        world_size=2,
        parameters=(
            parameter(bad, (8, 8), 2, dtype=bad),
            parameter(f"{bad}.0.{bad}", (8, 8), 2, dtype=bad),
            parameter(f"{bad}.0.{bad}2", (8, 8), 2, dtype=bad),
        ),
        notes=(bad,),
    )
    where = [
        rank_status(0, host=bad, device=bad, device_name=bad, models=(bad, bad), torch_version=bad),
        rank_status(1, host=bad + "2", device=bad + "2", device_name=bad + "2", models=(bad,)),
    ]
    tried = [probe(1), probe(25, why=bad)]
    row = replace(tuned_rows(1)[0], name=bad, ended_by=bad)
    said: dict[str, Any] = {"strategy": bad, "ended_by": bad, "notes": (bad,), "stamp": bad}
    tuning = search(probes=tried, rows=[row, replace(row, failure=bad)], pending=[bad], **said)
    tuned = replace(tuning, state="done")
    card = evaluated(metrics={bad: 1.0}, rows={bad: 2}, notes=(bad,), stamp=bad)
    return {
        "running": (training.html(frame), training.text(frame)),
        "last": (training.html(last), training.text(last)),
        "mosaic": (mosaic.html(model), mosaic.text(model)),
        "status": (status.html(where, stamp=bad), status.text(where, stamp=bad)),
        "evaluation": (evaluation.html(card), evaluation.text(card)),
        "tuning": (tuner.html(tuning), tuner.text(tuning)),
        "tuned": (tuner.html(tuned), tuner.text(tuned)),
    }


@pytest.mark.parametrize("kind", HOSTILE_VALUES)
def test_hostile_values_run_nothing_and_break_no_layout(kind: str) -> None:
    harmless = _panels("x")
    for panel, (source, text) in _panels(HOSTILE_VALUES[kind]).items():
        assert_harmless(source)
        assert Page(source).tree == Page(harmless[panel][0]).tree
        assert len(text.splitlines()) == len(harmless[panel][1].splitlines())
        for shown in (source, text):
            assert not re.search("[\x1b\u202e\u2066\u200f\u061c\u2028\x0b\ud800]", shown)
            assert max(map(len, shown.split()), default=0) < 5_000  # an image is one word
            assert len(shown) < 30_000
            json.dumps(shown, ensure_ascii=False).encode()


def test_markup_is_shown_as_what_it_is() -> None:
    for panel in ("running", "last", "mosaic", "evaluation", "tuning", "tuned"):
        source, _ = _panels(HOSTILE)[panel]
        assert "<img src=x" not in source
        assert "<img src=x onerror=alert(1)>" in Page(source).text


def test_the_text_of_an_exception_steers_nothing() -> None:
    for bad in HOSTILE_VALUES.values():
        failed = failure(exception_type=bad, message=bad, traceback=bad, notes=(bad,))
        shown = errors.text({0: failed})
        assert not re.search("[\x1b\u202e\u2066\u200f\u061c\u2028\x0b\ud800]", shown)
        json.dumps(shown, ensure_ascii=False).encode()


def test_control_characters_are_taken_out() -> None:
    assert plain("a\x1b[31mred\x1b[0m\x1b]0;title\x07b\r\nc\x00\u202e") == "aredb\nc\ufffd\ufffd"
    assert plain("a\u200f\u061c\u2028\ud800b\tc") == "a\ufffd\ufffd\ufffd\ufffdb\tc"


# ---------------------------------------------------------------- what can be read


_DRAWING = re.compile(r"<svg xmlns(?:(?!<svg xmlns).)*</svg>")
"""A drawing with those inside it."""


@cache
def _sources() -> tuple[str, ...]:
    """Every panel in every state that changes what is in it."""
    return tuple(_drawn())


def _drawn() -> Iterator[str]:
    for world in (2, 16):
        for state in STATES:
            yield training.html(view(state, world, message="why", notes=("a note",)))
        yield training.html(view("starting", world, ranks=unknown_ranks(world)))
        yield status.html([rank_status(rank) for rank in range(world)], stamp="14:03")
        yield mosaic.html(gpt2_xl(world))
    yield training.html(one_rank(memory(40)))
    yield training.html(view(losses=LossHistory([1.0, float("nan")]), steps=2))
    yield training.html(view(evaluates=True, metrics={"a": float("inf")}))
    yield evaluation.html(evaluated(metrics={"a": float("nan")}))
    for state in ("planning", "searching", "done", "stopped", "failed"):
        yield tuner.html(search(1, 24, 25, state=state, rows=tuned_rows(), pending=("ddp",)))


class _Inks(HTMLParser):
    """What each visible text is drawn with: opacity over everything, colour, size in pixels."""

    def __init__(self, source: str) -> None:
        super().__init__(convert_charrefs=True)
        self.found: list[tuple[str, float, str, float]] = []
        self._inks = [(1.0, "", 13.0)]
        self.feed(source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        style = dict(attrs).get("style") or ""
        opacity, colour, size = self._inks[-1]
        if found := re.search(r"(?<![-\w])opacity:([.\d]+)", style):
            opacity *= float(found[1])
        if found := re.search(r"(?<![-\w])color:(#[0-9A-Fa-f]{6})", style):
            colour = found[1]
        if found := re.search(r"font-size:([.\d]+)px", style):
            size = float(found[1])
        if tag not in ("img", "wbr"):
            self._inks.append((opacity, colour, size))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        self._inks.pop()

    def handle_data(self, data: str) -> None:
        if data.strip() and self._inks[-1][2]:
            self.found.append((data.strip(), *self._inks[-1]))


# Text and page: JupyterLab, nbconvert and VS Code, each light and dark.
_PAGES = [
    ("#000000", 0.87, "#FFFFFF"),
    ("#FFFFFF", 0.87, "#111111"),
    ("#FFFFFF", 0.87, "#212121"),
    ("#000000", 1.0, "#FFFFFF"),
    ("#FFFFFF", 1.0, "#111111"),
    ("#3B3B3B", 1.0, "#FFFFFF"),
    ("#CCCCCC", 1.0, "#1F1F1F"),
]


def test_every_small_text_stands_out_and_signs_do() -> None:
    found = {ink for source in _sources() for ink in _Inks(source).found}
    signs = {text for text, _, colour, _ in found if colour}
    assert signs >= {"●", "✓", "■", "✕", "▲", "○"}
    assert {size for _, _, _, size in found} >= {11.0, 12.0, 13.0}
    for ink, strength, page in _PAGES:
        for text, opacity, colour, _ in found:
            shown = _mixed(colour or ink, page, opacity * (1.0 if colour else strength))
            # a sign is a picture with its word beside it: 3:1 (WCAG 2.2, 1.4.11 and 1.4.3)
            least = 3 if colour else 4.5
            assert _contrast(shown, page) >= least, (text, opacity, colour, page)
            assert not colour or len(text) == 1, "colour carries no words, only signs"


def test_colours_stand_out_on_white_and_on_black() -> None:
    colours = {colour for _, _, colour in training.STATES.values()}
    for part in PARTS:
        colours.update(re.findall(r"#[0-9A-Fa-f]{6}", part.style))
    assert len(colours) >= 9
    for colour in colours:
        assert _contrast(_rgb(colour), "#FFFFFF") >= 3
        assert _contrast(_rgb(colour), "#111111") >= 3


_Rgb = tuple[float, float, float]


def _rgb(code: str) -> _Rgb:
    red, green, blue = (int(code[start : start + 2], 16) / 255 for start in (1, 3, 5))
    return red, green, blue


def _mixed(colour: str, page: str, opacity: float) -> _Rgb:
    over, under = _rgb(colour), _rgb(page)
    red, green, blue = (opacity * a + (1 - opacity) * b for a, b in zip(over, under, strict=True))
    return red, green, blue


def _contrast(colour: _Rgb, page: str) -> float:
    """Source: WCAG 2.2, contrast ratio and relative luminance."""

    def luminance(rgb: _Rgb) -> float:
        linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in rgb]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(colour), luminance(_rgb(page))))
    return (high + 0.05) / (low + 0.05)


def test_a_panel_speaks_to_a_screen_reader_only_when_it_is_asked() -> None:
    for source in _sources():
        page = Page(source)
        assert page.tags[0][1]["role"] == "group"
        assert page.tags[0][1]["aria-label"]
        assert "aria-live" not in source
        for tag, attributes in page.tags:
            assert tag != "img" or attributes["alt"]
            named = attributes.get("aria-label") or tag == "svg"
            assert attributes.get("role") not in ("img", "progressbar") or named
            assert tag not in ("th",) or attributes["scope"] == "col"
        for drawing in _DRAWING.findall(source):
            assert re.search("<title>(?:Loss over|Peak memory and)", drawing)


_KEPT = {
    *("align-items", "background", "border", "border-bottom", "border-collapse", "border-left"),
    *("border-radius", "border-top", "box-shadow", "box-sizing", "color", "cursor", "display"),
    *("flex", "flex-direction", "flex-wrap", "font-size", "font-weight", "gap", "height", "left"),
    *("grid-template-columns", "justify-content", "line-height", "margin", "margin-bottom"),
    *("margin-left", "margin-right", "margin-top", "max-width", "min-height", "min-width"),
    *("opacity", "overflow", "overflow-wrap", "overflow-x", "padding", "padding-bottom"),
    *("padding-left", "padding-right", "position", "table-layout", "text-align", "width"),
    *("right", "text-overflow", "top", "white-space", "align-items"),
}
"""What JupyterLab leaves of the styles of a notebook that is not trusted, as far as we use it.

Source: ``allowedStyles`` in @jupyterlab/apputils, sanitizer.ts, 4.6.
"""
_LOST = {"font-variant-numeric"}  # digits of unequal width are no loss


def test_styles_survive_in_a_notebook_that_is_not_trusted() -> None:
    for source in _sources():
        for style in re.findall(r'style="([^"]*)"', _DRAWING.sub("", source)):
            names = {part.partition(":")[0].strip() for part in style.split(";") if part.strip()}
            assert names <= _KEPT | _LOST, names - _KEPT - _LOST


# ---------------------------------------------------------------- memory has its name (F29)


@pytest.mark.parametrize("state", ["running", "done"])
def test_every_memory_size_of_a_training_panel_is_named(state: Any) -> None:
    heads = {"running": ["used", "peak used |"], "done": ["used at peak"]}[state]
    page = training.text(view(state))
    (row,) = [line for line in page.splitlines() if line.startswith("rank ") and "memory," in line]
    named = re.split(r"\s{2,}", row)
    assert named[:2] == ["rank", "memory, GiB"]
    assert named[2 : 2 + len(heads)] == heads
    sizes = re.findall(r"(\S+ \S+) [\d.]+ (?:GiB|MiB)", page)
    assert sizes  # each size outside the table, and the name before it
    for name in sizes:
        assert re.search(r"peak used|capacity|other", name), name


def test_the_parts_that_a_panel_names_add_up_to_used() -> None:
    sample = memory(10.4, used_bytes=int(50.7 * GIB))
    words = status.text([rank_status(0, memory=sample)], stamp="")
    bar = Page(status.html([rank_status(0, memory=sample)], stamp="")).all("div")
    label = next(a["aria-label"] for a in bar if a.get("aria-label", "").startswith("rank 0:"))
    parts = [float(size) for size in re.findall(r"[a-z] ([\d.]+)", label.partition(":")[2])]
    assert sum(parts) == pytest.approx(50.7, abs=0.05 * len(parts))
    assert "50.7" in words
