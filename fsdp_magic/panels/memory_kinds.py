"""How kinds of planned memory look, in a bar, a picture and a line of letters; pure.

Parameters, gradients, optimizer state and activations have the colours that they have in every
panel. What belongs to one of them for a moment has its colour, hatched: whole parameters that are
gathered, and what backward and the optimizer need in passing. A hatch is told from a plain
colour in every colour vision.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from fsdp_magic.core.planning.step_trace import Kind
from fsdp_magic.panels.parts import GREY

TINT = 0.33
"""Opacity between the strokes of a hatch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryKind:
    """A kind of memory as it is drawn.

    Attributes:
        kinds: of a plan that are drawn as one.
        name: in words.
        letter: in text.
        colour: of its boxes.
        is_hatched: whether they are hatched.
    """

    kinds: tuple[Kind, ...]
    name: str
    letter: str
    colour: str
    is_hatched: bool = False

    @property
    def style(self) -> str:
        """Inline style of a box."""
        if not self.is_hatched:
            return f"background:{self.colour}"
        # JupyterLab takes repeating gradients out where it does not trust a notebook.
        red, green, blue = (int(self.colour[at : at + 2], 16) for at in (1, 3, 5))
        tint = f"rgba({red},{green},{blue},{TINT})"
        return (
            f"background:linear-gradient(135deg,{self.colour} 25%,{tint} 25%,{tint} 50%,"
            f"{self.colour} 50%,{self.colour} 75%,{tint} 75%);background-size:6px 6px"
        )


MEMORY_KINDS: tuple[MemoryKind, ...] = (
    MemoryKind(kinds=("parameter",), name="parameters", letter="P", colour="#5C93E6"),
    MemoryKind(
        kinds=("gathered",),
        name="gathered parameters",
        letter="p",
        colour="#5C93E6",
        is_hatched=True,
    ),
    MemoryKind(kinds=("gradient",), name="gradients", letter="G", colour="#BF8613"),
    MemoryKind(kinds=("optimizer",), name="optimizer", letter="O", colour="#00733D"),
    MemoryKind(kinds=("activation",), name="activations", letter="A", colour="#884D8C"),
    MemoryKind(
        kinds=("temporary",), name="temporary", letter="t", colour="#884D8C", is_hatched=True
    ),
    MemoryKind(
        kinds=("communication",), name="communication", letter="c", colour=GREY, is_hatched=True
    ),
    MemoryKind(kinds=("input", "buffer"), name="batch and buffers", letter="x", colour=GREY),
)
"""From the bottom of a stack to its top."""


def drawn(sizes: Mapping[Kind, float]) -> list[float]:
    """Return the bytes of each of ``MEMORY_KINDS``."""
    return [sum(sizes.get(kind, 0) for kind in each.kinds) for each in MEMORY_KINDS]


def key_to_colours(kinds: Iterable[MemoryKind]) -> str:
    """Return the key to some kinds as HTML."""
    entries = "".join(
        f'<span style="white-space:nowrap;margin-right:10px">{swatch(kind)} {kind.name}</span> '
        for kind in kinds
    )
    return f'<span style="font-size:12px">{entries}</span>'


def swatch(kind: MemoryKind) -> str:
    """Return a small box in the style of a kind."""
    return f'<span style="display:inline-block;width:9px;height:9px;{kind.style}"></span>'
