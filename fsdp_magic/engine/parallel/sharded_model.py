"""ENGINE: a model that was spread over the ranks, whatever the strategy.

The module stays the person's object. What differs between strategies is behind the methods here:
where its parameters live, when they are whole, and how its gradients become those of all ranks.
Each strategy is a subclass in a file of its own; ``strategies.py`` picks it by name.

One automatic step asks for, in this order: ``reducing`` around each backward, ``reduce`` after the
last one, ``updated`` after the optimizers have stepped.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator
from contextlib import AbstractContextManager

import torch
from torch import nn

from fsdp_magic.core.placement import ParameterPlacement, Placement
from fsdp_magic.core.specs import ModelSpec
from fsdp_magic.engine.world import World


class ShardedModel(ABC):
    """A model that was spread over the ranks.

    It is held weakly, so that a model that nothing leads to any more is freed.

    Args:
        module: its root.
        name: what it was bound to.
        spec: how it is spread.
        world: over whom.

    Attributes:
        name: what it was bound to.
        reference: to the root.
        spec: how it is spread.
        notes: sentences a person should read.
        used: ids of the parameters, as optimizers hold them, that got a gradient on this rank
            since it was cleared.
        earlier: the parameters from before, as long as a person holds them, with what replaced
            each.
    """

    def __init__(self, module: nn.Module, *, name: str, spec: ModelSpec, world: World) -> None:
        self.name = name
        self.reference = weakref.ref(module)
        self.spec = spec
        self.notes: list[str] = []
        self.used: set[int] = set()
        self.earlier: list[tuple[weakref.ref[nn.Parameter], weakref.ref[nn.Parameter]]] = []
        self._world = world

    @property
    def strategy(self) -> str:
        """How it is spread, in a word."""
        return self.spec.strategy

    @property
    def replaced(self) -> dict[int, nn.Parameter]:
        """The present parameter by the id of an earlier one that a person still holds."""
        pairs = ((old(), new()) for old, new in self.earlier)
        return {id(old): new for old, new in pairs if old is not None and new is not None}

    @property
    def alive(self) -> bool:
        """Whether the model is still there."""
        return self.reference() is not None

    @property
    def module(self) -> nn.Module:
        """The root, of a model that is alive."""
        module = self.reference()
        assert module is not None
        return module

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters as optimizers must hold them, by dotted name."""
        return dict(self.module.named_parameters())

    # -- where parameters live

    @abstractmethod
    def placement(self) -> Placement:
        """Return where every parameter lives; the same on every rank, without communication."""

    def placed(self, parameters: Iterable[ParameterPlacement], *, replicas: int = 1) -> Placement:
        """Return where parameters live, with how the model is spread and computes.

        Args:
            parameters: in the model's order.
            replicas: copies of what is sharded.
        """
        return Placement(
            model=self.name,
            strategy=self.strategy,
            world_size=self._world.world_size,
            parameters=tuple(parameters),
            notes=tuple(self.notes),
            replicas=replicas,
            precision=self.spec.precision,
            activation_checkpointing=self.spec.activation_checkpointing or "",
            cpu_offload=self.spec.cpu_offload,
            compiled=self.spec.compile,
        )

    def in_place_of_gathered(self) -> dict[int, nn.Parameter]:
        """Return what an optimizer must hold, by the id of what a forward sees in its place."""
        return {}

    @abstractmethod
    def reshard(self) -> None:
        """Free gathered parameters, so that the next forward and any optimizer see the shards."""

    def leave(self) -> None:  # noqa: B027
        """Forget what is noted about the modules elsewhere: others take this model's place."""

    def come_back(self) -> None:  # noqa: B027
        """Note it again: the modules are this model's again."""

    @abstractmethod
    def settle(self, trained: Collection[int]) -> None:
        """Note, as a run begins, what of it is trained.

        Args:
            trained: ids of the parameters that optimizers hold.
        """

    # -- gradients

    @abstractmethod
    def added_up(self) -> AbstractContextManager[None]:
        """Add gradients up over the ranks inside, where they would be averaged."""

    @abstractmethod
    def reducing(self, *, is_last: bool) -> AbstractContextManager[None]:
        """Have one backward of a step inside.

        Args:
            is_last: whether it is the last one.
        """

    @abstractmethod
    def reduce(self) -> None:
        """Make gradients those of all ranks, if the backwards of the step have not done so.

        Collective: every rank must call this, after the last backward of a step. Gradients that
        are missing here and not on another rank are zeros by now (``Used.settle``).
        """

    def reduced_here(self) -> set[int]:
        """Return the ids of whole parameters whose gradients ``reduce`` takes care of."""
        return set()

    @abstractmethod
    def fill_missing(self, used: Collection[int]) -> None:
        """Have zeros as the gradients of parameters that only other ranks used.

        Args:
            used: ids of the parameters, as optimizers hold them, that some rank used.
        """

    @abstractmethod
    def leaves(self) -> Iterator[torch.Tensor]:
        """Yield the tensors that gradients of a backward arrive at."""

    @abstractmethod
    def updated(self) -> None:
        """Bring the new values of an optimizer step to where the next forward takes them.

        Collective: every rank must call this.
        """

    def clear_gradients(self) -> None:
        """Drop every gradient."""
        for parameter in self.named_parameters().values():
            parameter.grad = None

    @abstractmethod
    def forget_iteration(self) -> None:
        """Forget a forward or backward that an exception ended."""
