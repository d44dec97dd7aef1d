"""ENGINE: ``--meta``: a model built without memory, and initialised by its own rules as it is cut.

While the cell runs, large parameters that modules register are put on the meta device. Everything
else is real: buffers, small parameters, data, tensors of the person's; so what a constructor
computes for them is right. Just before a unit is sharded its parameters get memory, filled with
NaN, and are initialised, whole and alike on every rank, so no more than a unit is ever whole. The
rules are those of the model: ``_init_weights`` of transformers, or of a person's class that is
written in that way, after torch's ``reset_parameters`` of the module.

What is NaN afterwards nobody has initialised, and what a constructor wrote more often than the
rules do was initialised in a way that cannot be done again: both are named.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_magic.core.errors import FsdpError
from fsdp_magic.engine import randomness
from fsdp_magic.engine.world import World

SMALL_BYTES = 1 << 20
"""Parameters below this are built for real: together they are little, and many are constants."""


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Let large parameters that modules register inside have no memory."""
    genuine = nn.Module.register_parameter

    def registered(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        genuine(module, name, parameter)
        held = module._parameters.get(name)
        if held is None or held.is_meta or held.ndim == 0 or held.nbytes < SMALL_BYTES:
            return
        if held._version or isinstance(held, nn.UninitializedParameter):
            return  # made elsewhere, and written since
        meta = nn.Parameter(held.detach().to("meta"), requires_grad=held.requires_grad)
        vars(meta).update(vars(held))
        module._parameters[name] = meta

    nn.Module.register_parameter = registered  # type: ignore[method-assign, assignment]
    try:
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
        self._versions: dict[int, int] = {}
        self._missing: list[str] = []
        self._rewritten: list[str] = []
        self._names = {id(p): n for n, p in root.named_parameters() if p.is_meta}
        self._rules = dict(_rules(root)) if self._names else {}
        empty = [f"{name}.{n}" for n, b in root.named_buffers() if b.is_meta]
        if empty:
            raise FsdpError(
                f"nothing would fill buffers that have no memory: {', '.join(empty)}; build the "
                "model outside of torch.device('meta'), with --meta alone"
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
        metas: dict[int, tuple[nn.Parameter, bool]] = {}
        with randomness.put_back(), torch.no_grad():
            inside = [module for part in parts for module in part.modules()]
            for module in reversed(inside):  # what holds others comes after them
                if id(module) in self._done:
                    continue
                self._done.add(id(module))
                for attribute, meta in module._parameters.items():
                    if meta is not None and meta.is_meta:
                        metas[id(meta)] = meta, not self._rules[module][1]
                        module._parameters[attribute] = self._memory_of(meta)
                self._initialise(module)
        for meta, is_exact in metas.values():  # a tied one may have its rule at its last place
            self._judge(self._given[id(meta)], meta, is_exact=is_exact)
        return {self._given[id(meta)] for meta, _ in metas.values() if meta in whole}

    @property
    def given(self) -> dict[int, nn.Parameter]:
        """The new parameters of what was given last, by the ids of those on the meta device."""
        return dict(self._given)

    def check(self) -> None:
        """Raise, naming all, if the rules left anything without its values.

        Raises:
            FsdpError: naming the parameters.
        """
        for names, why in (
            (self._missing, "no rule initialises"),
            (self._rewritten, "the constructor writes, in a way that cannot be done again, to"),
        ):
            if names:
                raise FsdpError(
                    f"{why} {', '.join(f'{self._name}.{n}' for n in names)}; write the model's "
                    "rules into a method _init_weights(self, module) of its class, or leave "
                    "--meta out"
                )

    def _memory_of(self, meta: nn.Parameter) -> nn.Parameter:
        if id(meta) not in self._given:
            empty = torch.empty_like(meta, device=self._world.device)
            if empty.is_floating_point() or empty.is_complex():
                empty.fill_(torch.nan)
            given = nn.Parameter(empty, requires_grad=meta.requires_grad)
            vars(given).update(vars(meta))  # a person's marks on it, such as p.no_decay
            self._given[id(meta)], self._versions[id(meta)] = given, given._version
        return self._given[id(meta)]

    def _initialise(self, module: nn.Module) -> None:
        """Run the rules of a module; what was built for real stays as the constructor meant it."""
        given = {id(parameter) for parameter in self._given.values()}
        real = [p for p in module.parameters() if id(p) not in given and not isinstance(p, DTensor)]
        kept = [parameter.detach().clone() for parameter in real]
        randomness.seed_all((self._world.request.seed + 7919 * len(self._done)) % 2**32)
        rule, is_transformers = self._rules[module]
        owns = any(id(parameter) in given for parameter in module.parameters(recurse=False))
        if owns and not is_transformers:
            for name in ("reset_parameters", "_reset_parameters"):
                if hasattr(module, name):
                    getattr(module, name)()
                    break
        if rule is not None:
            _forget_initialised(module)
            rule(module)
        for parameter, content in zip(real, kept, strict=True):
            parameter.copy_(content)

    def _judge(self, given: nn.Parameter, meta: nn.Parameter, *, is_exact: bool) -> None:
        name = self._names[id(meta)]
        if given.is_floating_point() and bool(torch.isnan(given).any()):
            self._missing.append(name)
        elif is_exact and given._version - self._versions[id(meta)] < meta._version:
            self._rewritten.append(name)


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


def _is_pretrained(module: nn.Module) -> bool:
    return any(kind.__name__ == "PreTrainedModel" for kind in type(module).__mro__)


def _forget_initialised(module: nn.Module) -> None:
    """Let transformers' rules write again: their first run wrote to parameters without memory."""
    for each in (module, *module.parameters(recurse=False)):
        vars(each).pop("_is_hf_initialized", None)
