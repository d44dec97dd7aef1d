"""Which rows of which parameter each rank holds; pure.

``fully_shard`` cuts dim 0 of every parameter the way ``torch.chunk`` does: each rank takes
``ceil(rows / world size)`` rows until none are left, so the last ranks may hold fewer, or none.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from fsdp_magic.core.units import bytes_text

Kind = Literal["sharded", "replicated"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterPlacement:
    """Where one parameter lives.

    Attributes:
        name: its dotted name in the model.
        shape: the global shape.
        local_shapes: what each rank holds, by rank; a first dim of 0 means nothing.
        dtype: torch's name of the element type, without ``torch.``.
        element_bytes: bytes of one element.
        kind: ``sharded``: each rank holds a part; ``replicated``: each holds the whole.
        unit: dotted name of the FSDP unit that gathers it; ``""`` is the root.
    """

    name: str
    shape: tuple[int, ...]
    local_shapes: tuple[tuple[int, ...], ...]
    dtype: str
    element_bytes: int
    kind: Kind
    unit: str

    @property
    def local_bytes(self) -> tuple[int, ...]:
        """Bytes on each rank, by rank."""
        return tuple(math.prod(shape) * self.element_bytes for shape in self.local_shapes)

    @property
    def global_bytes(self) -> int:
        """Bytes of the whole parameter, counted once."""
        return math.prod(self.shape) * self.element_bytes


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Placement:
    """Where every parameter of one model lives.

    Attributes:
        model: the name it was bound to.
        strategy: how it was spread.
        world_size: number of ranks.
        parameters: in the model's order, tied ones once.
        notes: sentences a person should read (what was tied, replaced, left alone).
        replicas: copies of what is sharded; more than one under ``hybrid_shard``.
        precision: what forward and backward compute in; ``fp32``: as the weights were made.
        activation_checkpointing: of what activations are computed again; empty: of nothing.
        cpu_offload: whether shards are kept in host memory.
        compiled: whether units are compiled.
    """

    model: str
    strategy: str
    world_size: int
    parameters: tuple[ParameterPlacement, ...]
    notes: tuple[str, ...] = ()
    replicas: int = 1
    precision: str = "fp32"
    activation_checkpointing: str = ""
    cpu_offload: bool = False
    compiled: bool = False

    def __repr__(self) -> str:
        """Return one line; the panels show the parameters."""
        return (
            f"<Placement of {self.model}: {self.strategy}, {len(self.parameters)} parameters of "
            f"{bytes_text(self.global_bytes)} over {self.world_size} ranks>"
        )

    @property
    def local_bytes(self) -> tuple[int, ...]:
        """Bytes of parameters on each rank, by rank."""
        held = [parameter.local_bytes for parameter in self.parameters]
        return tuple(sum(row) for row in zip(*held, strict=True)) or (0,) * self.world_size

    @property
    def global_bytes(self) -> int:
        """Bytes of the model, each parameter counted once."""
        return sum(parameter.global_bytes for parameter in self.parameters)

    @property
    def unit_bytes(self) -> dict[str, int]:
        """Bytes of each unit when it is gathered, by its name; ``""`` is the root."""
        sizes: dict[str, int] = {}
        for parameter in self.parameters:
            if parameter.kind == "sharded":
                size = sizes.get(parameter.unit, 0)
                sizes[parameter.unit] = size + parameter.global_bytes
        return sizes

    @property
    def parameter_count(self) -> int:
        """Number of elements of the model."""
        return sum(math.prod(parameter.shape) for parameter in self.parameters)


def shard_rows(*, rows: int, world_size: int, rank: int) -> int:
    """Return how many rows of dim 0 a rank holds.

    Args:
        rows: length of dim 0 of the global parameter.
        world_size: number of ranks it is cut over.
        rank: the rank asked about.

    Source: ``torch.chunk``, which ``fully_shard`` follows (torch.distributed.tensor.Shard).
    """
    chunk = -(-rows // world_size)
    return max(0, min(chunk, rows - rank * chunk))
