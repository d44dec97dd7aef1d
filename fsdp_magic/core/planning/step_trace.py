"""What one training step of one process allocates, frees and passes; data only, pure.

It is traced without weights and without any strategy: parameters, their gradients and the state
of the optimizer are not among the allocations, they are told by name. An overlay adds them, and
whatever a strategy gathers and reduces. Every size is a polynomial in the samples of a
micro-batch, so that one trace stands for all of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

Kind = Literal[
    "parameter",
    "gradient",
    "optimizer",
    "activation",
    "temporary",
    "gathered",
    "communication",
    "input",
    "buffer",
]
"""What memory is of. ``temporary``: what backward or an optimizer needs for a moment;
``gathered``: whole parameters of a unit in use; ``communication``: what collectives read, write
and copy.

In a traced micro-step ``gathered`` and ``gradient`` are what there is in low precision where
parameters are whole: copies of parameters that are cast while a unit computes, and gradients cast
back to the dtype of their parameter; ``place`` is its name. Strategies that gather low-precision
parameters have neither, and leave both out."""

Mark = Literal[
    "forward",
    "forward_end",
    "recompute",
    "recompute_end",
    "backward",
    "module_backward",
    "inputs_backward",
    "gradient",
    "micro_step_end",
]
"""What a step passes: a module's forward (or its being computed again) begins and ends, backward
begins, the gradient of a module's output is there, those of its inputs are (told of modules that
are gathered), the gradient of a parameter is complete. The
trace frees that gradient just before its mark, which hands its bytes over to the overlay; where one
is there already, both are for a moment."""


class Size(NamedTuple):
    """Bytes as a polynomial in the samples of a micro-batch on one rank."""

    fixed: float = 0.0
    per_sample: float = 0.0
    per_pair: float = 0.0

    def at(self, micro_batch_size: int) -> float:
        """Return the bytes for a micro-batch size."""
        return self.fixed + micro_batch_size * (self.per_sample + micro_batch_size * self.per_pair)


class Allocated(NamedTuple):
    """Memory is taken.

    ``place`` is the dotted name of the module whose forward (or backward) took it; ``operator``
    torch's name of what did.
    """

    id: int
    size: Size
    kind: Kind
    place: str
    operator: str


class Freed(NamedTuple):
    """Memory is given back; ``carried``: what the micro-step before took under this id."""

    id: int
    carried: bool = False


class Reached(NamedTuple):
    """The step passes a mark; ``name`` is that of the module or parameter."""

    mark: Mark
    name: str = ""


Event = Allocated | Freed | Reached


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedParameter:
    """A parameter of the model, tied ones once.

    Attributes:
        name: its dotted name.
        shape: whole.
        element_bytes: of an element as it is kept.
        compute_bytes: of an element as forward uses it.
        trained: whether it requires a gradient and an optimizer holds it.
        whole: whether FSDP leaves it whole on every rank (scalars, running statistics in bf16).
    """

    name: str
    shape: tuple[int, ...]
    element_bytes: int = 4
    compute_bytes: int = 4
    trained: bool = True
    whole: bool = False

    @property
    def elements(self) -> int:
        """Elements of the whole parameter."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Bytes of the whole parameter as it is kept."""
        return self.elements * self.element_bytes

    @property
    def has_rows(self) -> bool:
        """Whether it can be cut."""
        return bool(self.shape) and self.elements > 0

    def rows_of(self, ranks: int) -> int:
        """Elements of the first rank's rows, which no rank has more of."""
        if not self.has_rows:
            return self.elements
        return -(-self.shape[0] // ranks) * math.prod(self.shape[1:])

    def local_elements(self, ranks: int) -> int:
        """Elements of the largest shard over some ranks: dim 0 is cut as ``torch.chunk`` does."""
        return self.elements if self.whole else self.rows_of(ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedModule:
    """A module of the model.

    Attributes:
        class_name: the name of its class.
        parameters: names of the parameters that are its own, as in ``StepTrace.parameters``; a
            tied one stands in every module that has it.
    """

    class_name: str
    parameters: tuple[str, ...] = ()


class OptimizerAllocated(NamedTuple):
    """An optimizer takes memory: so many bytes an element of a parameter on this rank, and some.

    ``kind`` is ``optimizer`` for state and ``temporary`` for what it frees in the same step.
    """

    id: int
    parameter: str
    per_element: float
    fixed: float
    kind: Kind


OptimizerEvent = OptimizerAllocated | Freed


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerTrace:
    """What the optimizers take in a first step, which makes their state, and in later ones.

    Attributes:
        name: such as ``AdamW (foreach)``.
        first: events of the first step.
        later: of each later one.
    """

    name: str
    first: tuple[OptimizerEvent, ...]
    later: tuple[OptimizerEvent, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTrace:
    """One micro-step of a model, and its optimizer.

    Attributes:
        parameters: by name, in the model's order.
        modules: by dotted name, ``""`` is the model.
        micro_step: forward and backward; what it leaves allocated is freed in the next one
            (``Freed.carried``), as variables of a cell are bound anew.
        optimizer: what the optimizer takes.
        units: for each ``--wrap`` rule asked for, the units: each names of modules that are
            gathered together, inner ones first; the rest is the root's.
        precision: it was traced in.
        activation_checkpointing: of what activations are computed again; empty: of nothing.
        standing: what is there before the first step and stays, whole on every rank: buffers, and
            what the first forwards of a model keep for later ones; negative numbers.
        flops: of forward and backward, in floating point operations.
        moved: bytes that operators read and write.
    """

    parameters: Mapping[str, TracedParameter]
    modules: Mapping[str, TracedModule]
    micro_step: tuple[Event, ...]
    optimizer: OptimizerTrace
    units: Mapping[str, tuple[tuple[str, ...], ...]] = field(default_factory=dict)
    precision: str = "fp32"
    activation_checkpointing: str = ""
    standing: tuple[Allocated, ...] = ()
    flops: Size = field(default_factory=Size)
    moved: Size = field(default_factory=Size)
