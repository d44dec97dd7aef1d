"""What FSDP2 needs to gather a unit and to reduce its gradients, in bytes on one rank; pure.

Source: ``foreach_all_gather``, ``foreach_all_gather_copy_out`` and ``foreach_reduce`` of
``torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py``, ``unshard``, ``wait_for_unshard`` and
``post_backward`` of ``_fsdp_param_group.py``, torch 2.13. Gloo's own buffers were seen in the
events of the allocator: ``_allgather_base`` gathers into a flat copy, ``_reduce_scatter_base``
reduces a copy of all of its input (``ProcessGroupGloo.cpp``); neither keeps it once it is waited
for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fsdp_magic.core.planning.ledger import Key, Ledger
from fsdp_magic.core.planning.step_trace import Kind, Reached, StepTrace, TracedParameter

if TYPE_CHECKING:
    from fsdp_magic.core.planning.overlay import Setting

_COMPUTING, _GATHERING, _REDUCING = 0, 1, 2
"""Streams of FSDP2."""
_REDUCED_BYTES = 4
"""Of an element that computes in low precision. Source: ``fsdp_policy`` of
engine/parallel/precision.py, which reduces in fp32."""


@dataclass(frozen=True, slots=True)
class Unit:
    """What is gathered together.

    Attributes:
        number: inner ones have lower ones.
        modules: their names.
        parameters: those that are cut.
        position: of its first module among all.
    """

    number: int
    modules: tuple[str, ...]
    parameters: tuple[TracedParameter, ...]
    position: int

    @property
    def is_root(self) -> bool:
        """Whether it is the model itself, with what is in no other unit."""
        return "" in self.modules

    @property
    def name(self) -> str:
        """A name to show."""
        return self.modules[0]


def units_of(trace: StepTrace, wrap: str) -> list[Unit]:
    """Return the units of a trace by a rule, inner ones first, the root last."""
    taken: set[str] = set()
    units: list[Unit] = []
    positions = {name: n for n, name in enumerate(trace.modules)}
    for heads in (*trace.units[wrap], ("",)):
        names: dict[str, None] = {}
        for head in heads:
            inside = f"{head}." if head else ""
            for module, facts in trace.modules.items():
                if module == head or module.startswith(inside):
                    names.update(dict.fromkeys(facts.parameters))
        own = [trace.parameters[n] for n in names if n not in taken]
        taken.update(names)
        cut = tuple(p for p in own if not p.whole)
        units.append(Unit(len(units), heads, cut, min(positions[h] for h in heads)))
    return [unit for unit in units if unit.parameters]


class UnitMemory:
    """Writes into a ledger what units take.

    Args:
        ledger: that of the rank.
        trace: of one process.
        setting: how it is spread.

    Attributes:
        ranks: that share one copy of the parameters.
    """

    def __init__(self, ledger: Ledger, trace: StepTrace, setting: Setting) -> None:
        self._ledger = ledger
        self._setting = setting
        hybrid = setting.strategy == "hybrid_shard" and setting.shard_size
        self.ranks = hybrid or setting.world_size
        self._is_low = trace.precision != "fp32"
        marks = (e for e in trace.micro_step if isinstance(e, Reached))
        self._arriving = {e.name for e in marks if e.mark == "gradient"}
        self._gathered: set[int] = set()
        self._ever_gathered: set[int] = set()
        self._last_of_forward: Key | None = None
        self._count = 0

    # -- gathering

    def gather(self, unit: Unit, *, is_forward: bool) -> None:
        """Have a unit's parameters whole, if they are not."""
        if unit.number in self._gathered:
            return
        self.begin_gathering(unit)
        if is_forward:
            self.free_last_gathering()
        self._gathered.add(unit.number)
        self._ever_gathered.add(unit.number)
        for p in unit.parameters:
            if self.ranks == 1 and self._is_cast(p):
                self._moment("cast of a shard", unit, p.elements * p.compute_bytes)
            self._take(("gathered", p.name), self._padded(p) * p.compute_bytes, "gathered", unit)
        key = ("all-gather buffer", unit.number)
        if is_forward:
            self._last_of_forward = key
        else:
            self._ledger.give_back(key)

    def begin_gathering(self, unit: Unit) -> None:
        """Gather a unit's parameters into one buffer."""
        key = ("all-gather buffer", unit.number)
        if unit.number in self._gathered or self._ledger.holds(key) or self.ranks == 1:
            return
        shards = sum(p.local_elements(self.ranks) * p.compute_bytes for p in unit.parameters)
        passing = list(self._from_host_and_cast(unit))
        self._take(key, shards * self.ranks, "communication", unit, _GATHERING)
        if self._setting.backend == "gloo":
            self._moment("gloo's all-gather copy", unit, shards * self.ranks)
        for each in passing:
            self._ledger.give_back(each)

    def _from_host_and_cast(self, unit: Unit) -> Iterator[Key]:
        """Take what shards pass through on their way into the buffer, and yield the keys."""
        if self._setting.cpu_offload:
            size = sum(p.local_elements(self.ranks) * p.element_bytes for p in unit.parameters)
            yield self._take(("shards from the host", unit.number), size, "communication", unit, 1)
        cast = [p for p in unit.parameters if self._is_cast(p)]
        if cast:
            size = sum(p.local_elements(self.ranks) * p.compute_bytes for p in cast)
            yield self._take(("cast of shards", unit.number), size, "communication", unit, 1)

    def free_last_gathering(self) -> None:
        """Free the buffer that the last gathering of a forward left for the next to overlap."""
        if self._last_of_forward is not None:
            self._ledger.give_back(self._last_of_forward)
        self._last_of_forward = None

    def free(self, unit: Unit) -> None:
        """Free a unit's whole parameters."""
        self._gathered.discard(unit.number)
        for p in unit.parameters:
            self._ledger.give_back(("gathered", p.name))

    def was_gathered(self, unit: Unit) -> bool:
        """Return whether a unit has ever been used."""
        return unit.number in self._ever_gathered

    # -- gradients

    def gradient(self, p: TracedParameter) -> None:
        """Take a whole gradient, or add it to that of earlier micro-steps."""
        key = ("whole gradient", p.name)
        if not self._ledger.holds(key):
            size = p.elements * p.compute_bytes
            self._ledger.take(key, size, "gradient", place=p.name)

    def keep_gradients(self, unit: Unit) -> None:
        """Keep whole gradients for the next micro-step, and free the parameters."""
        self._accumulate(unit)
        self.free(unit)
        for p in unit.parameters:
            key = ("accumulated gradient", p.name)
            low = ("whole gradient", p.name)
            if self._ledger.holds(low) and self._is_cast(p):
                self._ledger.take(key, p.elements * _REDUCED_BYTES, "gradient", place=p.name)
                self._ledger.give_back(low)

    def _accumulate(self, unit: Unit) -> None:
        """Add gradients to those in fp32 of earlier micro-steps; CPUs cast them to a copy first."""
        for p in unit.parameters:
            low = ("whole gradient", p.name)
            if self._ledger.holds(("accumulated gradient", p.name)) and self._ledger.holds(low):
                if self._setting.backend == "gloo":
                    self._moment("gradient cast to be added", unit, p.elements * _REDUCED_BYTES)
                self._ledger.give_back(low)

    def reduce(self, unit: Unit) -> None:
        """Make whole gradients those of this rank's shards, added up over the ranks."""
        ledger = self._ledger
        self._accumulate(unit)
        trained = [p for p in unit.parameters if p.trained or p.name in self._arriving]
        whole = [self._gradient_or_zeros(p) for p in trained]
        self.free(unit)
        for key in ledger.held("reduce-scatter input"):
            ledger.give_back(key)
        if not trained:
            return
        bytes_ = [_REDUCED_BYTES if self._is_low else p.compute_bytes for p in trained]
        size = sum(self._padded(p) * each for p, each in zip(trained, bytes_, strict=True))
        self._take(("reduce-scatter input", unit.number), size, "communication", unit)
        for key in whole:
            ledger.give_back(key)
        self._reduce_scatter(unit, size, trained)

    def _gradient_or_zeros(self, p: TracedParameter) -> Key:
        """Return where a whole gradient is; zeros if backward left none."""
        for term in ("accumulated gradient", "whole gradient"):
            if self._ledger.holds((term, p.name)):
                return term, p.name
        self.gradient(p)
        return "whole gradient", p.name

    def _reduce_scatter(self, unit: Unit, size: float, trained: list[TracedParameter]) -> None:
        """Reduce a unit's buffer, and have what comes out as gradients of this rank's shards."""
        ledger, gradients = self._ledger, ("gradient", unit.number)
        kept = sum(p.local_elements(self.ranks) * p.element_bytes for p in trained)
        passes = ledger.holds(gradients) or self._setting.cpu_offload
        is_cast = kept != size / self.ranks
        output = self._fresh("reduce-scatter output") if passes or is_cast else gradients
        self._take(output, size / self.ranks, "gradient", unit, _REDUCING)
        if self.ranks == 1:
            self._moment("gradients divided", unit, size, stream=_REDUCING)
        elif self._setting.backend == "gloo":
            self._moment("gloo's reduce-scatter copy", unit, size)
        if is_cast:
            cast = self._fresh("gradients as made") if passes else gradients
            self._take(cast, kept, "gradient", unit, _REDUCING)
            self._let_go(output)
            if passes:
                ledger.give_back(cast)
        elif passes:  # it is added to the gradients of micro-steps before, or goes to the host
            self._let_go(output)

    def _let_go(self, reduced: Key) -> None:
        """Free what was reduced; what was reduced between copies too stays until backward ends.

        Source: ``_all_reduce_state`` in ``post_backward`` and ``finalize_backward``.
        """
        if self._setting.strategy != "hybrid_shard":
            self._ledger.give_back(reduced)

    def end_backward(self) -> None:
        """Free what is kept for overlapping only."""
        for term in ("all-gather buffer", "reduce-scatter input", "reduce-scatter output"):
            for key in self._ledger.held(term):
                self._ledger.give_back(key)
        self._last_of_forward = None

    # -- bytes

    def _padded(self, p: TracedParameter) -> int:
        return p.local_elements(self.ranks) * self.ranks

    def _is_cast(self, p: TracedParameter) -> bool:
        return self._is_low and p.compute_bytes != p.element_bytes

    def _fresh(self, term: str) -> Key:
        self._count += 1
        return term, self._count

    def _take(self, key: Key, size: float, kind: Kind, unit: Unit, stream: int = _COMPUTING) -> Key:
        place = str(key[0]) if kind == "communication" else unit.name
        self._ledger.take(key, size, kind, place=place, stream=stream)
        return key

    def _moment(self, term: str, unit: Unit, size: float, *, stream: int = _COMPUTING) -> None:
        """Take memory and give it back at once."""
        key = self._fresh(term)
        self._ledger.give_back(self._take(key, size, "communication", unit, stream))
