"""ENGINE: ``--meta``: a model built without memory, and initialised by its own rules as it is cut.

While the cell runs, large parameters that modules register are put on the meta device. Everything
else is real: buffers, small parameters, data, tensors of the person's; so what a constructor
computes for them is right. Just before a unit is sharded its parameters get memory, filled with
NaN, and are initialised, whole and alike on every rank, so no more than a unit is ever whole. The
rules are those of the model: ``_init_weights`` of transformers, or of a person's class that is
written in that way, after torch's ``reset_parameters`` of the module.

What is NaN afterwards nobody has initialised, and what the constructor treated in another way than
the rules do would not be what it is without ``--meta``: both are named. ``writes.py`` knows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_magic.core.errors import FsdpError
from fsdp_magic.engine import randomness
from fsdp_magic.engine.parallel.writes import WritesMode
from fsdp_magic.engine.world import World

SMALL_BYTES = 1 << 20
"""Parameters below this are built for real: together they are little, and many are constants."""
_LATER = "do it in a later cell, or leave --meta out"
_of_the_cell = WritesMode()
"""What the last cell with ``--meta`` did."""


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Let large parameters that modules register inside have no memory."""
    global _of_the_cell
    genuine = nn.Module.register_parameter
    writes = _of_the_cell = WritesMode(SMALL_BYTES)

    def registered(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        genuine(module, name, parameter)
        held = module._parameters.get(name)
        if held is None or held.is_meta or held.ndim == 0 or held.nbytes < SMALL_BYTES:
            return
        if held._version or isinstance(held, nn.UninitializedParameter):
            return  # made elsewhere, and written since
        if writes.of(held) is None:
            return  # read from a file, say
        meta = nn.Parameter(held.detach().to("meta"), requires_grad=held.requires_grad)
        vars(meta).update(vars(held))
        module._parameters[name] = meta

    nn.Module.register_parameter = registered  # type: ignore[method-assign, assignment]
    try:
        with writes:
            yield
    finally:
        nn.Module.register_parameter = genuine  # type: ignore[method-assign]


def move(module: nn.Module, device: torch.device) -> None:
    """Move what has memory to a device; the rest gets its own there."""

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if tensor.is_meta else tensor.to(device)

    module._apply(moved)  # type: ignore[no-untyped-call]


class InitialWeights:
    """Gives memory and values to what a model has on the meta device, part by part.

    Args:
        root: the model.
        name: what it is bound to.
        world: the ranks.
    """

    def __init__(self, root: nn.Module, *, name: str, world: World) -> None:
        self._world = world
        self._name = name
        self._given: dict[int, nn.Parameter] = {}
        self._done: set[int] = set()
        self._seeds = 0
        self._versions: dict[int, int] = {}
        self._missing: list[str] = []
        self._other: list[str] = []
        self._copied: list[str] = []
        self._writes = WritesMode()
        self._names = {id(p): n for n, p in root.named_parameters() if p.is_meta}
        self._rules = dict(_rules(root)) if self._names else {}
        empty = [f"{name}.{n}" for n, b in root.named_buffers() if b.is_meta]
        if empty:
            raise FsdpError(
                f"nothing would fill buffers that have no memory: {', '.join(empty)}; they were "
                "made of parameters without values (by spectral_norm, say) or under "
                "torch.device('meta'); leave --meta, or torch.device('meta'), out"
            )

    def give(self, *parts: nn.Module, whole: Collection[nn.Parameter] = ()) -> set[nn.Parameter]:
        """Give parts, and all in them, memory and values; the same on every rank.

        Args:
            *parts: that are cut next, together.
            whole: parameters that are not cut.

        Returns:
            Those of the new parameters that are not cut.
        """
        if not self._names:
            return set()
        self._given.clear()  # those of the part before are cut by now
        metas: dict[int, nn.Parameter] = {}
        with self._writes, randomness.put_back(), torch.no_grad():
            inside = [m for part in parts for m in part.modules() if id(m) not in self._done]
            for module in inside:
                self._done.add(id(module))
                for attribute, meta in module._parameters.items():
                    if meta is not None and meta.is_meta:
                        metas[id(meta)] = meta
                        module._parameters[attribute] = self._memory_of(meta)
            for module in reversed(inside):  # whose weights others are tied to comes after them
                self._initialise(module, self._reset)
            for module in self._in_order_of_rules(parts, inside):
                self._initialise(module, self._apply_rule)
        for meta in metas.values():  # a tied one may have its rule at its last place
            self._judge(self._given[id(meta)], meta)
        return {self._given[id(meta)] for meta in metas.values() if meta in whole}

    @property
    def given(self) -> dict[int, nn.Parameter]:
        """The new parameters of what was given last, by the ids of those on the meta device."""
        return dict(self._given)

    def check(self) -> None:
        """Raise, naming all, if the rules left anything without its values.

        Raises:
            FsdpError: naming the parameters.
        """
        rules = (
            "write the model's rules into a method _init_weights(self, module) of its class, end "
            "its constructor with self.apply(self._init_weights), or leave --meta out"
        )
        for names, why, advice in (
            (self._missing, "no rule initialises", rules),
            (self._copied, "with --meta, values cannot be copied or loaded to", _LATER),
            (self._other, "the model's rules do not do again what the cell does to", rules),
        ):
            if names:
                listed = ", ".join(f"{self._name}.{n}" for n in names)
                raise FsdpError(f"{why} {listed}; {advice}")

    def _memory_of(self, meta: nn.Parameter) -> nn.Parameter:
        if id(meta) not in self._given:
            empty = torch.empty_like(meta, device=self._world.device)
            if empty.is_floating_point() or empty.is_complex():
                empty.fill_(torch.nan)
            given = nn.Parameter(empty, requires_grad=meta.requires_grad)
            vars(given).update(vars(meta))  # a person's marks on it, such as p.no_decay
            self._given[id(meta)], self._versions[id(meta)] = given, given._version
            self._writes.begin(given)
        return self._given[id(meta)]

    def _in_order_of_rules(
        self, parts: Iterable[nn.Module], inside: list[nn.Module]
    ) -> Iterator[nn.Module]:
        """Yield modules as transformers, which ties after it, and nn.Module.apply go over them."""
        yield from (module for module in reversed(inside) if self._rules[module][1])
        left = {id(module) for module in inside if not self._rules[module][1]}
        for module in (module for part in parts for module in _inner_first(part)):
            if id(module) in left:
                left.discard(id(module))
                yield module

    def _initialise(self, module: nn.Module, initialise: Callable[[nn.Module], None]) -> None:
        """Initialise a module; what was built for real stays as the constructor meant it."""
        given = {id(parameter) for parameter in self._given.values()}
        real = [p for p in module.parameters() if id(p) not in given and not isinstance(p, DTensor)]
        kept = [parameter.detach().clone() for parameter in real]
        self._seeds += 1
        randomness.seed_all((self._world.request.seed + 7919 * self._seeds) % 2**32)
        initialise(module)
        for parameter, content in zip(real, kept, strict=True):
            parameter.copy_(content)

    def _reset(self, module: nn.Module) -> None:
        """Run what torch's modules initialise themselves with; transformers goes without."""
        given = {id(parameter) for parameter in self._given.values()}
        owns = any(id(parameter) in given for parameter in module.parameters(recurse=False))
        if owns and not self._rules[module][1]:
            for name in ("reset_parameters", "_reset_parameters"):
                if hasattr(module, name):
                    getattr(module, name)()
                    break

    def _apply_rule(self, module: nn.Module) -> None:
        rule, _ = self._rules[module]
        if rule is not None:
            _forget_initialised(module)
            rule(module)

    def _judge(self, given: nn.Parameter, meta: nn.Parameter) -> None:
        name, done = self._names[id(meta)], _of_the_cell.of(meta)
        again = given._version - self._versions[id(meta)]
        if done and done != self._writes.of(given) and any(write.copies for write in done):
            self._copied.append(name)
        elif given.is_floating_point() and bool(torch.isnan(given).any()):
            self._missing.append(name)
        elif again < meta._version if done is None else done and done != self._writes.of(given):
            self._other.append(name)


def _rules(
    module: nn.Module, rule: Any = None, is_transformers: bool = False
) -> Iterator[tuple[nn.Module, tuple[Any, bool]]]:
    """Yield each module with the rule of the nearest one around it that has one for its parts."""
    own = getattr(module, "_init_weights", None)
    if callable(own):
        rule, is_transformers = own, _is_pretrained(module)
    for child in module.children():
        yield from _rules(child, rule, is_transformers)
    yield module, (rule, is_transformers)


def _inner_first(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        yield from _inner_first(child)
    yield module


def _is_pretrained(module: nn.Module) -> bool:
    return any(kind.__name__ == "PreTrainedModel" for kind in type(module).__mro__)


def _forget_initialised(module: nn.Module) -> None:
    """Let transformers' rules write again: their first run wrote to parameters without memory."""
    for each in (module, *module.parameters(recurse=False)):
        vars(each).pop("_is_hf_initialized", None)
