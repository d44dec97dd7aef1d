"""FSDP of torch 1.12: each unit one flat parameter; an overlay beside those of the planner.

Source: ``torch/distributed/fsdp/{fully_sharded_data_parallel,flatten_params_wrapper,wrap}.py`` of
torch 1.12; the functions named below are theirs. What differs from FSDP2:

- Units are modules with at least so many parameters of their own (``_recursive_wrap``). Parameters
  that two units share become two.
- A unit's gradient is put together from those of its parameters, then padded by a copy, then
  reduced (``_post_backward_hook``).
- Nothing is gathered ahead, as accelerate asked for no prefetch, and the root is freed like any
  other unit (``forward``).
- Gradients are zeroed, not freed, so the next step has them (``_prep_grads_for_backward``).
- With offloading, gradient shards stay on the device until backward ends
  (``_wait_for_post_backward``).
- A unit's whole parameter is made and emptied once, before its first forward, on the stream that
  computes (``_init_param_attributes``).
- One rank alone shards nothing: with offloading a unit's parameters are copied to the device in
  forward, where autograd keeps them, and once more in backward (``_rebuild_full_params``).
"""

from __future__ import annotations

from dataclasses import dataclass

from fsdp_magic.core.planning.ledger import Key
from fsdp_magic.core.planning.overlay import Overlay, Setting
from fsdp_magic.core.planning.step_trace import Reached, StepTrace, TracedParameter
from published.loops import take_buffers, without_buffers

GATHERING, REDUCING = 1, 2
"""Streams beside the one that computes. Source: ``_setup_streams``."""
NEVER_WRAPPED = ("ModuleList", "ModuleDict")
"""Source: ``default_auto_wrap_policy.EXCLUDE_WRAP_MODULES``."""


@dataclass(frozen=True, slots=True)
class FlatUnit:
    """A module that is gathered at once.

    Attributes:
        module: its dotted name; empty: the root, with what no other unit has.
        parameters: of the trace, in its order.
    """

    module: str
    parameters: tuple[TracedParameter, ...]

    @property
    def elements(self) -> int:
        """Elements of the flat parameter, without padding."""
        return sum(p.elements for p in self.parameters)


class _Wrapping:
    """Finds units by size, innermost first. Source: ``_recursive_wrap``."""

    def __init__(self, trace: StepTrace, least_elements: int | None) -> None:
        self._trace = trace
        self._least = least_elements
        self.units: list[FlatUnit] = []
        if least_elements is not None:
            for child in self._children(""):
                self._wrap(child)
        self.units.append(FlatUnit("", self._own("")))

    def _children(self, module: str) -> list[str]:
        return [m for m in self._trace.modules if m and m.rpartition(".")[0] == module]

    def _own(self, module: str) -> tuple[TracedParameter, ...]:
        """Return the parameters below a module that are in no unit inside it."""
        inside = [m.module for m in self.units if not module or m.module.startswith(f"{module}.")]
        names: dict[str, None] = {}
        for each, facts in self._trace.modules.items():
            below = not module or each == module or each.startswith(f"{module}.")
            if below and not any(each == m or each.startswith(f"{m}.") for m in inside):
                names.update(dict.fromkeys(facts.parameters))
        return tuple(self._trace.parameters[name] for name in names)

    def _wrap(self, module: str) -> int:
        """Make units of a module and what is inside; return the elements that are in units."""
        assert self._least is not None
        everything = sum(p.elements for p in self._own(module))
        if everything < self._least:
            return 0
        wrapped = sum(map(self._wrap, self._children(module)))
        is_list = self._trace.modules[module].class_name in NEVER_WRAPPED
        if everything - wrapped < self._least or is_list:
            return wrapped
        self.units.append(FlatUnit(module, self._own(module)))
        return everything


def flat_units(trace: StepTrace, least_elements: int | None) -> list[FlatUnit]:
    """Return the units of a model that have parameters, inner ones first, the root last.

    Args:
        trace: of the model, its parameters untied.
        least_elements: ``min_num_params``; None: no auto-wrap, all are the root's.
    """
    return [unit for unit in _Wrapping(trace, least_elements).units if unit.parameters]


class FlatParameterOverlay(Overlay):
    """``FULL_SHARD`` and ``SHARD_GRAD_OP`` on flat parameters.

    Args:
        trace: of the model, its parameters untied.
        setting: strategy, world size, offloading.
        least_elements: as ``flat_units`` takes it.
    """

    def __init__(self, trace: StepTrace, setting: Setting, *, least_elements: int | None) -> None:
        super().__init__(without_buffers(trace), setting)
        self._buffers = trace.standing
        self.ranks = setting.world_size
        self.units = flat_units(trace, least_elements)
        self._of_module = {u.module: n for n, u in enumerate(self.units)}
        self._of_parameter = {p.name: n for n, u in enumerate(self.units) for p in u.parameters}
        self._missing: dict[int, set[str]] = {}
        self._done: set[int] = set()
        self._is_made: set[int] = set()

    def shard_elements(self, number: int) -> int:
        """Return the elements of one rank's shard. Source: ``_get_shard``, which pads."""
        return -(-self.units[number].elements // self.ranks)

    def begin(self) -> None:
        """Take buffers and this rank's shards, which with offloading are in host memory."""
        take_buffers(self.ledger, self._buffers)
        if self.setting.cpu_offload:
            return
        for number, unit in enumerate(self.units):
            size = self.shard_elements(number) * 4
            self.ledger.take(("parameter", number), size, "parameter", place=unit.module)

    def passes(self, reached: Reached, *, is_last: bool) -> None:
        """Gather, free and reduce."""
        number = self._of_module.get(reached.name)
        match reached.mark:
            case "forward" if number is not None:
                self._gather(number)
            case "forward_end" if number is not None:
                if self.setting.strategy == "full_shard":
                    self._free(number)
            case "module_backward" if number is not None and number not in self._done:
                self._gather(number, is_backward=True)
            case "gradient":
                self._gradient(reached.name)
            case "micro_step_end":
                self._finish()

    def _gather(self, number: int, *, is_backward: bool = False) -> None:
        """Put a whole unit on the device. Source: ``_rebuild_full_params``."""
        unit, whole = self.units[number], self.shard_elements(number) * self.ranks * 4
        if self.ranks == 1:
            if self.setting.cpu_offload:
                self._take_once(("copied again" if is_backward else "gathered", number), whole)
            return
        if self.ledger.holds(("gathered", number)):
            return
        if number not in self._is_made:
            self._is_made.add(number)
            self.ledger.take(("made", number), whole, "gathered", place=unit.module)
            self.ledger.give_back(("made", number))
        if self.setting.cpu_offload:
            size = self.shard_elements(number) * 4
            self.ledger.take(("arriving", number), size, "communication", stream=GATHERING)
        self._take_once(("gathered", number), whole, place=unit.module)
        self.ledger.give_back(("arriving", number))

    def _take_once(self, key: Key, size: int, *, place: str = "") -> None:
        if not self.ledger.holds(key):
            self.ledger.take(key, size, "gathered", place=place, stream=GATHERING)

    def _free(self, number: int) -> None:
        """Free a whole unit. Source: ``_free_full_params``, which leaves what is not sharded."""
        if self.ranks > 1:
            self.ledger.give_back(("gathered", number))

    def _gradient(self, name: str) -> None:
        """Keep a parameter's gradient until its unit has all of them."""
        number, p = self._of_parameter[name], self.trace.parameters[name]
        self.ledger.take(("whole gradient", name), p.elements * 4, "gradient", place=name)
        missing = self._missing.setdefault(number, {q.name for q in self.units[number].parameters})
        missing.discard(name)
        if not missing:
            self._reduce(number)

    def _reduce(self, number: int) -> None:
        """Reduce a unit's gradient. Source: ``_post_backward_hook``."""
        ledger, unit = self.ledger, self.units[number]
        self._done.add(number)
        # Autograd joins the gradients of the views that the parameters are into a new tensor.
        ledger.take(("flat", number), unit.elements * 4, "gradient", place=unit.module)
        for p in unit.parameters:
            ledger.give_back(("whole gradient", p.name))
        if self.ranks == 1:
            ledger.give_back(("gathered", number))
            ledger.give_back(("copied again", number))
            return
        self._free(number)
        shard = self.shard_elements(number) * 4
        padded = ("padded", number)
        ledger.take(padded, shard * self.ranks, "communication", stream=REDUCING)
        kept, reduced = ("gradient", number), ("reduced", number)
        if ledger.holds(kept):
            ledger.take(reduced, shard, "communication", stream=REDUCING)
        else:
            ledger.take(kept, shard, "gradient", place=unit.module, stream=REDUCING)
        for key in (reduced, padded, ("flat", number)):
            ledger.give_back(key)

    def _finish(self) -> None:
        """End a backward pass. Source: ``_wait_for_post_backward``."""
        for number in range(len(self.units)):
            self._free(number)
        if self.setting.cpu_offload:
            for key in (*self.ledger.held("gradient"), *self.ledger.held("flat")):
                self.ledger.give_back(key)
        self._missing, self._done = {}, set()

    def optimizer_elements(self, parameter: TracedParameter) -> int:
        """Return a flat parameter's shard for the first parameter of each unit.

        The optimizer knows flat parameters only, so one stands for all of its unit; with offloading
        it works in host memory.
        """
        number = self._of_parameter[parameter.name]
        is_first = self.units[number].parameters[0].name == parameter.name
        if self.setting.cpu_offload or not is_first:
            return 0
        return self.shard_elements(number)

    def updated(self) -> None:
        """Leave the gradients: ``zero_grad`` of that time filled them with zeros."""
