"""The placement mosaic: which rows fold, what each cell says, how large it gets."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from panel_records import Page, assert_harmless, gpt2_xl, numbers, parameter, placement

from fsdp_magic.core.placement import Placement
from fsdp_magic.panels import mosaic
from fsdp_magic.panels.module_rows import module_rows, rank_groups


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
    assert re.search(r"head.weight 1×64\s+▇+\s+–\s+256 B", mosaic.text(model))


def test_totals_are_there() -> None:
    model = gpt2_xl(2)
    for shown in (Page(mosaic.html(model)).text, mosaic.text(model)):
        assert re.search(r"total\s+2.9 GiB\s+2.9 GiB\s+5.8 GiB", shown)
        assert "580 tensors" in shown


@pytest.mark.parametrize("world", [2, 16])
def test_the_text_has_the_numbers_of_the_table(world: int) -> None:
    source = mosaic.html(gpt2_xl(world)).split("<details")[0] + "</div>"
    seen = Page(re.sub(r'font-size:0px">[^<]*<', 'font-size:0px"><', source)).text
    assert numbers(seen) == numbers(mosaic.text(gpt2_xl(world)))


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


def in_units(blocks: int, *, inner: str = "") -> Placement:
    """Return a model of equal blocks that are units, an embedding, and a part inside each."""
    held = [replace(parameter("wte", (64, 8), 2), unit="")]
    for block in range(blocks):
        unit = f"h.{block}"
        held.append(replace(parameter(f"{unit}.w", (8, 8), 2), unit=unit))
        within = f"{unit}.{inner}" if inner else unit
        held.append(replace(parameter(f"{unit}.norm.w", (8,), 2), unit=within))
    return placement(held, 2)


def both(model: Placement) -> tuple[str, str]:
    """Return what the panel and its text say."""
    return Page(mosaic.html(model)).text, mosaic.text(model)


def test_units_are_named_and_the_largest_is_told() -> None:
    for shown in both(in_units(3)):
        assert "4 units: h.{0…2}, the root; the largest 2.0 KiB (the root)" in shown
    for shown in both(placement([parameter("w", (8, 8), 2)], 2)):
        assert "1 unit: the whole model" in shown


def test_units_of_many_kinds_are_cut_short() -> None:
    units = ["a", "b.0.x", "b.2.x", "b.3.x", "c.1", "c.2", "d", "e", "f"]
    held = [replace(parameter(f"{unit}.w", (8, 8), 2), unit=unit) for unit in units]
    for shown in both(placement(held, 2)):
        assert "9 units: a, b.{0,2,3}.x, c.{1…2}, d and 2 kinds more; the largest" in shown


def test_how_it_computes_can_be_confirmed() -> None:
    plain = placement([parameter("w", (8, 8), 2, dtype="float64")], 2)
    for shown in both(plain):
        assert "computes in float64" in shown
        assert "checkpointing" not in shown
    changed = replace(
        plain,
        precision="bf16",
        activation_checkpointing="selective",
        cpu_offload=True,
        compiled=True,
    )
    said = "computes in bf16 · activation checkpointing: selective · CPU offload · compiled"
    for shown in both(changed):
        assert said in shown


def replicated(world: int, strategy: str) -> Placement:
    """Return GPT-2 XL, whole on every rank."""
    whole = [parameter(p.name, p.shape, world, kind="replicated") for p in gpt2_xl(1).parameters]
    return replace(placement(whole, world), strategy=strategy)


def test_what_is_whole_says_what_is_not() -> None:
    for shown in both(replicated(2, "zero1")):
        assert "the optimizer's state in shards" in shown
    for strategy in ("ddp", "hybrid_shard"):
        for shown in both(replicated(2, strategy)):
            assert "the optimizer's state whole on each rank" in shown


def test_ranks_that_hold_everything_share_a_column_and_every_row_opens() -> None:
    page = Page(mosaic.html(replicated(8, "ddp")))
    assert "each rank" in page.text
    assert "rank 7" not in page.text
    assert "more tensors are not opened" not in page.text
    assert len(page.all("details")) == 2
    assert re.search(r"total\s+5.8 GiB\s+46.4 GiB", mosaic.text(replicated(8, "ddp")))


def test_rows_say_which_unit_gathers_them() -> None:
    titles = [tag for tag in mosaic.html(in_units(3)).split("<b") if "gathered" in tag]
    assert [re.search('title="(.*?)"', tag)[1] for tag in titles] == [
        "gathered with unit the root",
        "gathered with unit h.{0…2}",
    ]
    nested = mosaic.html(in_units(3, inner="norm"))
    assert "gathered with units h.{0…2}, h.{0…2}.norm" in nested


def test_a_block_of_another_unit_does_not_fold() -> None:
    model = in_units(3)
    left = tuple(replace(p, unit="") if p.unit == "h.2" else p for p in model.parameters)
    assert [row.name for row in module_rows(left)] == ["wte", "h.{0…1}", "h.2"]


@pytest.mark.parametrize(
    ("world", "copies", "said"),
    [
        (8, 2, "8 ranks · 2 copies: ranks 0-3, 4-7 · 1 tensor"),
        (2, 2, "2 ranks · 2 copies, one on each rank · 1 tensor"),
        (64, 8, "64 ranks · 8 copies: ranks 0-7, 8-15, 16-23, …, 56-63 · 1 tensor"),
    ],
)
def test_the_ranks_of_each_copy_are_said(world: int, copies: int, said: str) -> None:
    model = placement([parameter("w", (8, 8), world)], world)
    for shown in both(replace(model, strategy="hybrid_shard", replicas=copies)):
        assert said in shown
