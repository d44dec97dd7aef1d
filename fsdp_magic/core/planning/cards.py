"""Graphics cards by the names people type: memory as the driver reports it, speeds; pure.

A card's name tells how much memory was made, the driver how much of it programs may have: of
``24 GB`` that is 22.2 to 23.7 GiB. Memory here is what torch's own out-of-memory messages name as
``total capacity`` on such a card; where reports differ by a driver, it is the smaller one.

Speeds are those of the maker's data sheets: dense matrix products without sparsity, memory, and
the link between cards in one direction. They rank strategies; no card reaches them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Literal

from fsdp_magic.core.errors import UsageError
from fsdp_magic.core.units import GIB
from fsdp_magic.core.wording import nearest, quoted

Link = Literal["NVLink", "PCIe"]
_ISSUES = "https://github.com/"


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A graphics card.

    Attributes:
        name: as it is shown and typed.
        memory_gib: as torch reports it.
        memory_source: where that was reported.
        fp32_tflops: of matrix products in float32 without TF32, which torch leaves off.
        half_tflops: of matrix products in bf16, or fp16 where it has no bf16, added up in float32.
        has_bf16: whether it computes in bf16.
        memory_gb_per_second: of its memory.
        link: between cards.
        link_gb_per_second: of the link in one direction.
        host_gb_per_second: to the host's memory in one direction.
        data_sheet: where the speeds are from.
    """

    name: str
    memory_gib: float
    memory_source: str
    fp32_tflops: float
    half_tflops: float
    has_bf16: bool = True
    memory_gb_per_second: float
    link: Link = "PCIe"
    link_gb_per_second: float
    host_gb_per_second: float
    data_sheet: str

    @property
    def memory_bytes(self) -> int:
        """Bytes of memory that the driver reports."""
        return int(self.memory_gib * GIB)

    def tflops(self, precision: str) -> float:
        """Return the speed of matrix products in a precision."""
        return self.fp32_tflops if precision == "fp32" else self.half_tflops


_V100 = Card(
    name="V100-16GB",
    memory_gib=15.78,
    memory_source=_ISSUES + "kchengiva/Shift-GCN/issues/34",
    fp32_tflops=15.7,
    half_tflops=125,
    has_bf16=False,
    memory_gb_per_second=900,
    link="NVLink",
    link_gb_per_second=150,
    host_gb_per_second=16,
    data_sheet="NVIDIA V100 Tensor Core GPU (SXM2), data sheet (2020)",
)
CARDS: tuple[Card, ...] = (
    Card(
        name="T4",
        memory_gib=14.56,
        memory_source=_ISSUES + "AlphaGPU/leetgpu-challenges/issues/52",
        fp32_tflops=8.1,
        half_tflops=65,
        has_bf16=False,
        memory_gb_per_second=320,
        link_gb_per_second=16,
        host_gb_per_second=16,
        data_sheet="NVIDIA T4 Tensor Core GPU, data sheet (2019)",
    ),
    _V100,
    replace(
        _V100,
        name="V100-32GB",
        memory_gib=31.74,
        memory_source=_ISSUES + "liucongg/ChatGLM-Finetuning/issues/73",
    ),
    Card(
        name="A10G",
        memory_gib=22.20,
        memory_source=_ISSUES + "XavierXiao/Dreambooth-Stable-Diffusion/issues/18",
        fp32_tflops=35,
        half_tflops=70,
        memory_gb_per_second=600,
        link_gb_per_second=32,
        host_gb_per_second=32,
        data_sheet="NVIDIA A10G, data sheet (2021)",
    ),
    Card(
        name="A30",
        memory_gib=23.53,
        memory_source=_ISSUES + "google/RB-Modulation/issues/5",
        fp32_tflops=10.3,
        half_tflops=165,
        memory_gb_per_second=933,
        link_gb_per_second=32,
        host_gb_per_second=32,
        data_sheet="NVIDIA A30 Tensor Core GPU, data sheet (2022)",
    ),
    Card(
        name="A100-40GB",
        memory_gib=39.50,
        memory_source=_ISSUES + "TianheWu/CoSeR/issues/10",
        fp32_tflops=19.5,
        half_tflops=312,
        memory_gb_per_second=1555,
        link="NVLink",
        link_gb_per_second=300,
        host_gb_per_second=32,
        data_sheet="NVIDIA A100 Tensor Core GPU (SXM4), data sheet (2020)",
    ),
    Card(
        name="A100-80GB",
        memory_gib=79.25,
        memory_source=_ISSUES + "wbfwonderful/Vad-R1/issues/11",
        fp32_tflops=19.5,
        half_tflops=312,
        memory_gb_per_second=2039,
        link="NVLink",
        link_gb_per_second=300,
        host_gb_per_second=32,
        data_sheet="NVIDIA A100 Tensor Core GPU (SXM4), data sheet (2021)",
    ),
    Card(
        name="H100-80GB",
        memory_gib=79.11,
        memory_source=_ISSUES + "vllm-project/vllm/issues/27508",
        fp32_tflops=67,
        half_tflops=989,
        memory_gb_per_second=3350,
        link="NVLink",
        link_gb_per_second=450,
        host_gb_per_second=64,
        data_sheet="NVIDIA H100 Tensor Core GPU (SXM5), data sheet (2023)",
    ),
    Card(
        name="H200",
        memory_gib=139.75,
        memory_source=_ISSUES + "NVIDIA/mig-parted/issues/120",
        fp32_tflops=67,
        half_tflops=989,
        memory_gb_per_second=4800,
        link="NVLink",
        link_gb_per_second=450,
        host_gb_per_second=64,
        data_sheet="NVIDIA H200 Tensor Core GPU (SXM5), data sheet (2024)",
    ),
    Card(
        name="L4",
        memory_gib=21.96,
        memory_source=_ISSUES + "rhymes-ai/Aria/issues/24 (four cards, not named there)",
        fp32_tflops=30.3,
        half_tflops=121,
        memory_gb_per_second=300,
        link_gb_per_second=32,
        host_gb_per_second=32,
        data_sheet="NVIDIA L4 Tensor Core GPU, data sheet (2023)",
    ),
    Card(
        name="L40S",
        memory_gib=44.53,
        memory_source=_ISSUES + "Wan-Video/Wan2.1/issues/205",
        fp32_tflops=91.6,
        half_tflops=362,
        memory_gb_per_second=864,
        link_gb_per_second=32,
        host_gb_per_second=32,
        data_sheet="NVIDIA L40S, data sheet (2023)",
    ),
    Card(
        name="RTX-3090",
        memory_gib=23.70,
        memory_source=_ISSUES + "GaoLii/DSP/issues/10",
        fp32_tflops=35.6,
        half_tflops=71,
        memory_gb_per_second=936,
        link_gb_per_second=32,
        host_gb_per_second=32,
        data_sheet="NVIDIA Ampere GA102 GPU architecture, white paper (2020)",
    ),
    Card(
        name="RTX-4090",
        memory_gib=23.52,
        memory_source=_ISSUES + "sgl-project/sglang/issues/12496",
        fp32_tflops=82.6,
        half_tflops=165,
        memory_gb_per_second=1008,
        link_gb_per_second=32,
        host_gb_per_second=32,
        data_sheet="NVIDIA Ada GPU architecture, white paper (2022)",
    ),
    Card(
        name="RTX-5090",
        memory_gib=31.37,
        memory_source=_ISSUES + "Wan-Video/Wan2.1/issues/465",
        fp32_tflops=104.8,
        half_tflops=209.5,
        memory_gb_per_second=1792,
        link_gb_per_second=64,
        host_gb_per_second=64,
        data_sheet="NVIDIA RTX Blackwell GPU architecture, white paper (2025)",
    ),
    Card(
        name="RTX-6000-Ada",
        memory_gib=44.43,
        memory_source=_ISSUES + "DINGYANB/MTVCrafter/issues/21",
        fp32_tflops=91.1,
        half_tflops=364,
        memory_gb_per_second=960,
        link_gb_per_second=32,
        host_gb_per_second=32,
        data_sheet="NVIDIA RTX 6000 Ada Generation, data sheet (2023)",
    ),
    Card(
        name="Titan-RTX",
        memory_gib=23.65,
        memory_source="https://huggingface.co/blog/pytorch-fsdp",
        fp32_tflops=16.3,
        half_tflops=130.5,
        has_bf16=False,
        memory_gb_per_second=672,
        link_gb_per_second=16,
        host_gb_per_second=16,
        data_sheet="NVIDIA Turing GPU architecture, white paper (2018), TU102",
    ),
)


def find_card(text: str, *, what: str) -> Card:
    """Return the card that a name means: ``A100-80GB``, ``a100 80g``, ``NVIDIA RTX 4090``.

    Args:
        text: what was typed.
        what: the option it was typed for, named in the error.

    Raises:
        UsageError: if no card, or more than one, has that name.
    """
    wanted = _plain(text)
    found = [card for card in CARDS if wanted and wanted in (_plain(card.name), *_short(card))]
    if len(found) == 1:
        return found[0]
    sizes = [card.name for card in CARDS if wanted and _plain(card.name).startswith(wanted)]
    if len(sizes) > 1:
        raise UsageError(
            f"{what} {quoted(text)} is sold in more than one size; say {' or '.join(sizes)}"
        )
    if re.fullmatch(r"[\d.]+", text.strip()):
        raise UsageError(f"{what} {quoted(text)} has no unit; type {what} {text.strip()}GiB")
    near = nearest(wanted, [_plain(card.name) for card in CARDS])
    meant = next((card.name for card in CARDS if _plain(card.name) == near), "")
    ask = f"did you mean {meant}? " if meant else ""
    known = ", ".join(card.name for card in CARDS)
    raise UsageError(
        f"{what} {quoted(text)} is neither a size nor a card that is known; {ask}type a size such "
        f"as 24GiB, or one of {known}"
    )


_ADORNMENT = re.compile(r"nvidia|tesla|geforce|quadro|sxm\d?|pcie|[^a-z0-9]")


def _plain(text: str) -> str:
    """Return a name without what people leave out or write in many ways."""
    return re.sub(r"(\d)gi?b?$", r"\1gb", _ADORNMENT.sub("", text.lower()))


def _short(card: Card) -> tuple[str, ...]:
    """Return the names that mean a card beside its own: without ``RTX``, without the only size."""
    same = [each for each in CARDS if _unsized(each) == _unsized(card)]
    bare = (_plain(_unsized(card)),) if len(same) == 1 else ()
    return (_plain(card.name).removeprefix("rtx"), *bare)


def _unsized(card: Card) -> str:
    """Return a card's name without its memory."""
    return re.sub(r"-\d+GB$", "", card.name)
