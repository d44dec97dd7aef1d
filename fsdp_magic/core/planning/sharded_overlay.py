"""Strategies on FSDP2: ``full_shard``, ``shard_grad_op`` and ``hybrid_shard``; pure.

Source: ``torch/distributed/fsdp/_fully_shard/{_fsdp_state,_fsdp_param_group,_fsdp_collectives,
_fsdp_param}.py`` of torch 2.13: when a unit is gathered, prefetched, freed and reduced, and what
each needs for it (``unit_memory.py``).
"""

from __future__ import annotations

from fsdp_magic.core.planning.overlay import Overlay, Setting
from fsdp_magic.core.planning.step_trace import Allocated, Reached, StepTrace, TracedParameter
from fsdp_magic.core.planning.unit_memory import Unit, UnitMemory, units_of


class ShardedOverlay(Overlay):
    """Parameters in shards, gathered unit by unit."""

    def __init__(self, trace: StepTrace, setting: Setting) -> None:
        super().__init__(trace, setting)
        self.units = units_of(trace, setting.wrap)
        self._memory = UnitMemory(self.ledger, trace, setting)
        self._of_module = {name: unit for unit in self.units for name in unit.modules}
        self._of_parameter = {p.name: unit for unit in self.units for p in unit.parameters}
        self._begin_micro_step()

    def _begin_micro_step(self) -> None:
        self._order: list[Unit] = []
        """Units in the order in which their forwards ended."""
        self._places: dict[int, list[int]] = {}
        """Where in that order a unit stands, by its number."""
        self._running: dict[int, list[str]] = {}
        """Modules of a unit that have begun, by its number."""
        self._in_backward: set[int] = set()
        self._done: set[int] = set()
        """Units whose backward is over."""

    def begin(self) -> None:
        """Take this rank's shards."""
        for name, p in self.trace.parameters.items():
            if p.whole:
                self.ledger.take(("parameter", name), p.bytes, "parameter", place=name)
            elif not self.setting.cpu_offload:
                size = p.local_elements(self._memory.ranks) * p.element_bytes
                self.ledger.take(("parameter", name), size, "parameter", place=name)

    def has(self, allocated: Allocated) -> bool:
        """Leave out casts of parameters: they are gathered in low precision."""
        return allocated.kind not in ("gathered", "gradient")

    def passes(self, reached: Reached, *, is_last: bool) -> None:
        """Gather, free and reduce units."""
        unit = self._of_module.get(reached.name)
        match reached.mark:
            case "forward" if unit is not None:
                self._running.setdefault(unit.number, []).append(reached.name)
                self._memory.gather(unit, is_forward=True)
            case "forward_end" if unit is not None:
                self._end_forward(unit)
            case "recompute" if unit is not None and unit.number not in self._in_backward:
                self._memory.gather(unit, is_forward=True)
            case "module_backward" if unit is not None:
                self._begin_backward(unit)
            case "inputs_backward" if unit is not None:
                if self._running[unit.number][0] == reached.name:
                    self._end_backward(unit, reduces=self._reduces(is_last=is_last))
            case "gradient":
                self._gradient(reached.name)
            case "micro_step_end":
                self._end_micro_step(reduces=self._reduces(is_last=is_last))

    def _reduces(self, *, is_last: bool) -> bool:
        return is_last or self.setting.accumulate_sync != "last"

    def _end_forward(self, unit: Unit) -> None:
        if len(set(self._running[unit.number])) < len(unit.modules):
            return  # others that are gathered with it are still to run
        if self.setting.strategy != "shard_grad_op" and not unit.is_root:
            self._memory.free(unit)
        self._places.setdefault(unit.number, []).append(len(self._order))
        self._order.append(unit)
        if unit.is_root:
            self._memory.free_last_gathering()

    def _begin_backward(self, unit: Unit) -> None:
        """Gather a unit for its backward, and begin to gather the one that comes next."""
        if unit.number in self._in_backward:
            return
        self._in_backward.add(unit.number)
        self._done.discard(unit.number)
        self._memory.gather(unit, is_forward=False)
        places = self._places.get(unit.number)
        if places and (place := places.pop()) > 0:
            self._memory.begin_gathering(self._order[place - 1])

    def _end_backward(self, unit: Unit, *, reduces: bool) -> None:
        self._in_backward.discard(unit.number)
        self._done.add(unit.number)
        if not self._memory.was_gathered(unit):
            return
        if reduces:
            self._memory.reduce(unit)
        else:
            self._memory.keep_gradients(unit)

    def _end_micro_step(self, *, reduces: bool) -> None:
        """End the backwards of units whose inputs need no gradient: the root's first."""
        for unit in sorted(self.units, key=lambda u: (not u.is_root, u.position)):
            if unit.number not in self._done:
                self._end_backward(unit, reduces=reduces)
        self._memory.end_backward()
        self._begin_micro_step()

    def _gradient(self, name: str) -> None:
        unit, p = self._of_parameter.get(name), self.trace.parameters[name]
        if unit is not None:
            self._memory.gradient(p)
        elif not self.ledger.holds(("gradient", name)):
            self.ledger.take(("gradient", name), p.bytes, "gradient", place=name)

    def optimizer_elements(self, parameter: TracedParameter) -> int:
        """Return the elements of this rank's shard; none if it is kept in host memory."""
        if self.setting.cpu_offload and not parameter.whole:
            return 0
        return parameter.local_elements(self._memory.ranks)

    def updated(self) -> None:
        """Free the gradients."""
        for key in self.ledger.held("gradient"):
            self.ledger.give_back(key)
