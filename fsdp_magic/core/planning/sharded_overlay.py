"""Strategies on FSDP2: ``full_shard``, ``shard_grad_op`` and ``hybrid_shard``; pure.

Source: ``torch/distributed/fsdp/_fully_shard/{_fsdp_state,_fsdp_param_group,_fsdp_collectives,
_fsdp_param}.py`` of torch 2.13: when a unit is gathered, prefetched, freed and reduced, and what
each needs for it.
"""

from __future__ import annotations

from dataclasses import dataclass

from fsdp_magic.core.planning.overlay import Overlay, Setting
from fsdp_magic.core.planning.step_trace import Reached, StepTrace, TracedParameter

_GATHERING, _REDUCING = 1, 2
"""Streams of FSDP2 beside the one that computes."""


@dataclass(frozen=True, slots=True)
class Unit:
    """What is gathered together."""

    number: int
    modules: tuple[str, ...]
    parameters: tuple[TracedParameter, ...]


def units_of(trace: StepTrace, wrap: str) -> list[Unit]:
    """Return the units of a trace by a rule, inner ones first, the root last."""
    taken: set[str] = set()
    units: list[Unit] = []
    for heads in (*trace.units[wrap], ("",)):
        names: dict[str, None] = {}
        for head in heads:
            inside = f"{head}." if head else ""
            for module, facts in trace.modules.items():
                if module == head or module.startswith(inside):
                    names.update(dict.fromkeys(facts.parameters))
        own = [trace.parameters[n] for n in names if n not in taken]
        taken.update(names)
        units.append(Unit(len(units), heads, tuple(p for p in own if not p.whole)))
    return [unit for unit in units if unit.parameters]


class ShardedOverlay(Overlay):
    """Parameters in shards, gathered unit by unit."""

    def __init__(self, trace: StepTrace, setting: Setting) -> None:
        super().__init__(trace, setting)
        self.units = units_of(trace, setting.wrap)
        self.ranks = setting.shard_size or setting.world_size
        self._of_module = {name: unit for unit in self.units for name in unit.modules}
        self._of_parameter = {p.name: unit for unit in self.units for p in unit.parameters}
        self._order: list[int] = []
        self._missing: dict[int, set[str]] = {}

    def begin(self) -> None:
        """Take this rank's shards."""
        for p in self.trace.parameters.values():
            if not self.setting.cpu_offload or p.whole:
                size = p.local_elements(self.ranks) * p.element_bytes
                self.ledger.take(("parameter", p.name), size, "parameter")

    def passes(self, reached: Reached, *, is_last: bool) -> None:  # noqa: ARG002
        """Gather, free and reduce units."""
        unit = self._of_module.get(reached.name)
        match reached.mark:
            case "forward" if unit is not None:
                self._order.append(unit.number)
                self._gather(unit)
            case "forward_end" if unit is not None:
                if self.setting.strategy == "full_shard" and reached.name != "":
                    self._free(unit)
            case "backward":
                for key in self.ledger.held("gathering"):
                    self.ledger.give_back(key)
            case "module_backward" | "recompute" if unit is not None:
                self._gather(unit, is_forward=False)
            case "gradient":
                self._gradient(reached.name)
            case "micro_step_end":
                for unit in self.units:
                    self._free(unit)
                for key in [*self.ledger.held("gathering"), *self.ledger.held("reducing")]:
                    self.ledger.give_back(key)
                self._order, self._missing = [], {}

    def _padded(self, p: TracedParameter) -> int:
        return p.local_elements(self.ranks) * self.ranks

    def _gather(self, unit: Unit, *, is_forward: bool = True) -> None:
        if self.ledger.holds(("gathered", unit.number, unit.parameters[0].name)):
            return
        before = self.ledger.held("gathering")
        size = sum(self._padded(p) * p.compute_bytes for p in unit.parameters)
        self.ledger.take(("gathering", unit.number), size, "communication", stream=_GATHERING)
        for key in before:
            self.ledger.give_back(key)
        for p in unit.parameters:
            key = ("gathered", unit.number, p.name)
            self.ledger.take(key, p.elements * p.compute_bytes, "gathered", place=unit.modules[0])
        if not is_forward:
            self.ledger.give_back(("gathering", unit.number))

    def _free(self, unit: Unit) -> None:
        for p in unit.parameters:
            self.ledger.give_back(("gathered", unit.number, p.name))

    def _gradient(self, name: str) -> None:
        unit, p = self._of_parameter.get(name), self.trace.parameters[name]
        if unit is None:
            if not self.ledger.holds(("gradient", name)):
                self.ledger.take(("gradient", name), p.elements * p.element_bytes, "gradient")
            return
        self.ledger.take(("whole gradient", name), p.elements * p.compute_bytes, "gradient")
        missing = self._missing.setdefault(
            unit.number, {q.name for q in unit.parameters if q.trained}
        )
        missing.discard(name)
        if not missing:
            self._reduce(unit)

    def _reduce(self, unit: Unit) -> None:
        self._free(unit)
        for key in self.ledger.held("reducing"):
            self.ledger.give_back(key)
        trained = [p for p in unit.parameters if p.trained]
        size = sum(self._padded(p) * 4 for p in trained)
        self.ledger.take(("reducing", unit.number), size, "communication")
        for p in trained:
            self.ledger.give_back(("whole gradient", p.name))
        for p in trained:
            if not self.ledger.holds(("gradient", p.name)):
                size = p.local_elements(self.ranks) * 4
                self.ledger.take(("gradient", p.name), size, "gradient", stream=_REDUCING)

    def optimizer_elements(self, parameter: TracedParameter) -> int:
        """Return the elements of this rank's shard."""
        return parameter.local_elements(self.ranks)

    def updated(self) -> None:
        """Free the gradients."""
        for key in self.ledger.held("gradient"):
            self.ledger.give_back(key)
