"""ENGINE: from the options of a run to the data that it reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fsdp_magic.core.errors import FsdpError
from fsdp_magic.core.specs import TrainSpec
from fsdp_magic.core.specs.data import DataSpec
from fsdp_magic.engine.agreement import WorldAgreement
from fsdp_magic.engine.collating import Collate
from fsdp_magic.engine.cut import Cut
from fsdp_magic.engine.data import CountLabels, Data
from fsdp_magic.engine.expressions import evaluate, split_at_commas
from fsdp_magic.engine.interrupts import INTERRUPTS
from fsdp_magic.engine.position import Position
from fsdp_magic.engine.world import World


def open_data(
    spec: TrainSpec,
    namespace: Mapping[str, Any],
    *,
    world: World,
    position: Position,
    count_labels: CountLabels | None = None,
) -> Data | None:
    """Return the data that a run reads; None if the cell brings its own.

    Collective: every rank must call this.

    Raises:
        FsdpError: if a name leads nowhere, or the data cannot be cut as asked.
    """
    if spec.data is None:
        return None
    with INTERRUPTS.allowed():  # lengths and functions are the person's code
        sources = named_sources(spec, namespace)
        for name, source in zip(names_of(spec), sources, strict=True):
            position.named(name, source)
        return Data(
            sources,
            cut=_cut(spec, namespace, world),
            goes_round=spec.steps is not None,
            epochs=None if spec.steps is not None else spec.epochs or 1,
            device=world.device,
            position=position,
            agreement=WorldAgreement(world),
            count_labels=count_labels,
        )


def names_of(spec: DataSpec) -> list[str]:
    """Return the expressions that ``--data`` gives, one for each source."""
    return [] if spec.data is None else split_at_commas(spec.data, flag="--data")


def named_sources(spec: DataSpec, namespace: Mapping[str, Any]) -> list[Any]:
    """Return what ``--data`` names, one or several.

    Raises:
        FsdpError: if a name leads nowhere, or --collate is to make batches of several.
    """
    names = names_of(spec)
    if len(names) > 1 and spec.collate is not None:
        raise FsdpError(
            f"--collate {spec.collate} cannot say which of {', '.join(names)} it is for; put it "
            "into a DataLoader: DataLoader(dataset, batch_size=8, collate_fn=...)"
        )
    return [evaluate(name, namespace, flag="--data") for name in names]


def named_collate(spec: DataSpec, namespace: Mapping[str, Any]) -> Collate | None:
    """Return the function that ``--collate`` names; None without it.

    Raises:
        FsdpError: if it is none.
    """
    if spec.collate is None:
        return None
    collate: Collate = evaluate(spec.collate, namespace, flag="--collate")
    if not callable(collate):
        raise FsdpError(
            f"--collate {spec.collate} is a {type(collate).__name__}; it takes a function: list "
            "of samples -> batch"
        )
    return collate


def length(spec: TrainSpec, data: Data | None) -> int | None:
    """Return the number of steps of a run; None: the data says when it is at its end."""
    if spec.steps is not None:
        return spec.steps
    if data is None:
        return 1
    if data.steps_per_epoch is None:
        return None
    return data.steps_per_epoch * (spec.epochs or 1)


def _cut(spec: TrainSpec, namespace: Mapping[str, Any], world: World) -> Cut:
    shared = spec.data_sharding == "auto"
    return Cut(
        rank=world.rank if shared else 0,
        ranks=world.world_size if shared else 1,
        worker_rank=world.rank,
        seed=world.request.seed,
        micro_batch_size=spec.micro_batch_size,
        accumulate=spec.accumulate,
        global_batch_size=spec.global_batch_size,
        tokens_per_batch=spec.tokens_per_batch,
        shuffle=not spec.no_shuffle,
        collate=named_collate(spec, namespace),
    )
