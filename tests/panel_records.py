"""Records that panels are drawn from, and a reader of what they draw."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html.parser import HTMLParser
from typing import Any

from fsdp_magic.core.placement import ParameterPlacement, Placement, shard_rows
from fsdp_magic.core.reply import Failure
from fsdp_magic.core.telemetry import (
    DeviceSample,
    EvaluationRecord,
    MemorySample,
    RankStatus,
    RunState,
)
from fsdp_magic.core.units import GIB, MIB
from fsdp_magic.panels.evaluation import EvaluationView
from fsdp_magic.panels.loss_history import LossHistory
from fsdp_magic.panels.training_view import RankView, TrainingView

HOSTILE = "<img src=x onerror=alert(1)>\"'&\x1b[2J\n</details></table>"
STATES: tuple[RunState, ...] = ("starting", "running", "done", "stopped", "failed")
ALLOWED_TAGS = {
    *("div", "span", "b", "table", "thead", "tbody", "tr", "th", "td"),
    *("pre", "img", "wbr", "details", "summary"),
}
SVG_TAGS = {"svg", "title", "path", "circle", "rect"}
ALLOWED_ATTRIBUTES = {"style", "title", "role", "scope", "alt", "src", "open", "colspan"}


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


def unknown_ranks(world: int) -> tuple[RankView, ...]:
    """Ranks of which nothing is known yet, as in the first frames of a run."""
    return tuple(
        RankView(rank=rank, device_name="", memory=None, peak_memory=None) for rank in range(world)
    )


def one_rank(sample: MemorySample) -> TrainingView:
    rank = RankView(rank=0, device_name="gpu", memory=sample, peak_memory=sample)
    return view(world=1, ranks=(rank,))


def history(losses: Sequence[float]) -> dict[str, Any]:
    """What of a frame follows from its losses."""
    return {"losses": LossHistory(losses), "steps": len(losses)}


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
        "losses": LossHistory(3.0 - 0.01 * step for step in range(steps)),
        "grad_norm": 0.532 if steps else None,
        "learning_rate": 3e-4 if steps else None,
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


def evaluated(**changes: Any) -> EvaluationView:
    values: dict[str, Any] = {
        "step": 1200,
        "loss": 2.4132,
        "metrics": {"accuracy": 0.9312},
        "samples": 13_000,
        "seconds": 12.4,
        "rows": {"logits": 13_000, "label": 13_000, "rare": 1},
        "notes": ("read once",),
        "stamp": "18:31:02",
    }
    return EvaluationView(**(values | changes))


def evaluation_record(**changes: Any) -> EvaluationRecord:
    values: dict[str, Any] = {"step": 40, "loss": 1.25, "metrics": {"f1": 0.5}, "samples": 9}
    return EvaluationRecord(**(values | changes))


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
        if tag not in ("img", "wbr"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        self.words += [" "] * (tag in ("div", "tr", "td", "th", "details", "summary"))

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join("".join(self.words).split())

    @property
    def tree(self) -> list[str]:
        """The elements in their order."""
        return [tag for tag, _ in self.tags]

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
