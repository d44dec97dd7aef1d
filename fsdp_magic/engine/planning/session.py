"""ENGINE: ``%fsdp_plan`` without a cell: the session's model, data and last training cell.

Rank 0 forks. In the child the spreading is taken back, parameters become fake ones of the whole
shapes, and the cell runs on a batch of its own data. Nothing of the engine is touched. With CUDA,
where a fork cannot take backward, the engine does it itself and puts everything back.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._mode_utils import no_dispatch

from fsdp_magic.core.errors import FsdpError
from fsdp_magic.core.planning.requests import (
    BuiltReport,
    BuiltRequest,
    PlanRequest,
    TraceFailed,
    TraceReport,
)
from fsdp_magic.core.protocol import TrainRequest
from fsdp_magic.core.reply import Reply
from fsdp_magic.engine import cells, modeling
from fsdp_magic.engine.batches import mapped, sample_count
from fsdp_magic.engine.cut import Cut
from fsdp_magic.engine.feeding import named_collate, named_sources
from fsdp_magic.engine.interrupts import INTERRUPTS
from fsdp_magic.engine.micro_step import BINDABLE
from fsdp_magic.engine.optimizers import parameters_of, repoint
from fsdp_magic.engine.parallel.sharded_model import ShardedModel
from fsdp_magic.engine.parallel.unspread import changes_of
from fsdp_magic.engine.planning.alone import REFUSAL, FsdpAlone
from fsdp_magic.engine.planning.fake_mode import PlanningMode
from fsdp_magic.engine.planning.forked import in_fork
from fsdp_magic.engine.planning.program import Described, values_explained
from fsdp_magic.engine.planning.put_back import in_engine
from fsdp_magic.engine.planning.traces import traces_of
from fsdp_magic.engine.planning.weightless import make_fake
from fsdp_magic.engine.position import Position
from fsdp_magic.engine.reachable import reachable
from fsdp_magic.engine.state import State
from fsdp_magic.engine.telemetry import MemoryWatch
from fsdp_magic.engine.track import Track


def built(engine: State, request: BuiltRequest) -> Reply:  # noqa: ARG001
    """Say how the models were built; the report is a ``BuiltReport``."""
    names = modeling.bound_names(engine.models, engine.namespace)
    report = BuiltReport(
        specs={name: engine.models[name].spec for name in names},
        ranks_on_host=engine.world.request.local_world_size,
        capacity_bytes=MemoryWatch([], []).now().capacity_bytes,
    )
    return Reply(rank=engine.world.rank, report=report)


def plan(engine: State, request: PlanRequest) -> Reply:
    """Trace the last training cell; the report is a ``TraceReport``, a ``TraceFailed`` or None.

    None: it was interrupted. Only one rank is asked, and no other notices.
    """
    with engine.cell({}), engine.world.groups.only((engine.world.rank,), refusal=REFUSAL):
        try:
            with INTERRUPTS.allowed():
                report = _in_copy(engine, lambda: _traced(engine, request))
        except KeyboardInterrupt:
            INTERRUPTS.close()
            report = None
        except FsdpError as error:
            report = TraceFailed(failure=cells.describe(error))
    return Reply(rank=engine.world.rank, report=report)


def _in_copy(engine: State, work: Callable[[], TraceReport]) -> Any:
    return in_fork(work) if can_fork(engine) else in_engine(engine, work)


def can_fork(engine: State) -> bool:
    """Return whether a fork of this engine can take backward."""
    has_cuda: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return engine.world.device.type == "cpu" and not has_cuda


def _traced(engine: State, request: PlanRequest) -> TraceReport:
    """Trace; nothing is put back."""
    started = time.monotonic()
    training, namespace = request.training, engine.namespace
    cell = cells.compile_training_cell(training.code, training.name, shell=engine.shell)
    batch = _a_batch(engine, training)
    samples = sample_count(batch)
    if samples is None:
        raise FsdpError(
            "the tensors of a batch do not agree on its samples (dim 0), so no other number of "
            "them can be planned; write example_batch(b) into a %%fsdp_plan cell"
        )
    (name,) = modeling.bound_names(engine.models, namespace)
    root, optimizers = _unspread(engine.models[name], namespace)
    fake = PlanningMode()
    make_fake(root, optimizers, fake)
    fsdp = FsdpAlone(engine.world.rank, engine.world.world_size)
    names = {**engine.names_of_cells(), "fsdp": fsdp, "step": 0, "micro_step": 0, "epoch": 0}
    namespace.update(names, total_steps=training.spec.steps, device=torch.device("cpu"))

    def make_batch(b: int) -> Any:
        namespace["micro_batch_size"] = b
        return _resized(batch, samples, b, tokens=request.sequence_length)

    def loss_of(batch: Any) -> torch.Tensor:
        namespace["batch"] = batch
        for name in BINDABLE:
            namespace.pop(name, None)
        with values_explained():
            cell.run(namespace)
        loss = namespace.get("loss")
        if isinstance(loss, torch.Tensor):
            namespace["loss"] = loss.detach()
        return loss  # type: ignore[return-value]  # what is none is refused where it is used

    described = Described(model=root, optimizers=optimizers, make_batch=make_batch, loss_of=loss_of)
    traces, untraced = traces_of(
        described, request.variants, fake, wraps=request.wraps, kind=request.device_kind
    )
    return TraceReport(
        traces=traces,
        seconds=time.monotonic() - started,
        notes=(_note(batch, request.sequence_length), *described.notes),
        untraced=untraced,
    )


def _unspread(model: ShardedModel, namespace: dict[str, Any]) -> tuple[nn.Module, list[Optimizer]]:
    """Return the model as it was before it was spread, and its optimizers, without state.

    Parameters are on the meta device, of the whole shapes.
    """
    model.reshard()
    root, held = model.module, model.named_parameters()
    whole = dict(root.named_parameters())
    optimizers = list(reachable(namespace, Optimizer).values())
    for optimizer in optimizers:
        repoint(optimizer, model.replaced)
    model.leave()
    changes = changes_of(root)
    changes.take_back()
    replaced: dict[int, nn.Parameter] = {}
    for name, parameter in whole.items():
        new = nn.Parameter(
            torch.empty(parameter.shape, dtype=parameter.dtype, device="meta"),
            requires_grad=parameter.requires_grad,
        )
        replaced[id(parameter)] = replaced[id(held[name])] = new
    for module in {id(m): m for m in (*root.modules(), *changes.modules)}.values():
        for attribute, present in module._parameters.items():
            if present is not None:
                module._parameters[attribute] = replaced.get(id(present), present)
    for optimizer in optimizers:
        optimizer.state.clear()
        repoint(optimizer, replaced)
    ours = {id(p) for p in root.parameters()}
    return root, [o for o in optimizers if any(id(p) in ours for p in parameters_of(o))]


def _a_batch(engine: State, training: TrainRequest) -> Any:
    """Return a micro-batch of the data that a run reads, from its beginning.

    Raises:
        FsdpError: if there is none.
    """
    spec, namespace = training.spec, engine.namespace
    cut = Cut(
        rank=0,
        ranks=1,
        seed=engine.world.request.seed,
        micro_batch_size=spec.micro_batch_size,
        tokens_per_batch=spec.tokens_per_batch,
        shuffle=not spec.no_shuffle,
        collate=named_collate(spec, namespace),
    )
    position = Position()
    taken = []
    for source in named_sources(spec, namespace):
        track = Track(source, cut=cut, cursor=position.cursor(source))
        if not (track.begins_anew or can_fork(engine)):
            raise FsdpError(
                "the data can be read once, and a plan would take from it; write example_batch(b) "
                "into a %%fsdp_plan cell"
            )
        taken.append(track.take())
        track.close()
    if not taken or None in taken:
        raise FsdpError(
            f"--data {spec.data} yields no whole micro-batch; lower --micro-batch-size, or write "
            "example_batch(b) into a %%fsdp_plan cell"
        )
    parts = [batches[0] for batches in taken if batches]
    return parts[0] if len(parts) == 1 else tuple(parts)


def _resized(batch: Any, samples: int, b: int, *, tokens: int | None) -> Any:
    """Return a batch with another number of samples and, if asked, of tokens: its own, repeated."""
    ids = _ids_of(batch)
    length = None if ids is None or tokens is None else ids.shape[1]
    wanted = tokens or 0

    def resized(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.ndim and len(tensor) == samples:
            tensor = tensor[torch.arange(b) % samples]
        if length is not None and tensor.ndim > 1 and tensor.shape[1] == length:
            tensor = tensor[:, torch.arange(wanted) % length]
        return tensor

    with no_dispatch():  # real samples, of which ids keep values
        return mapped(batch, resized)


def _ids_of(batch: Any) -> torch.Tensor | None:
    """Return the tokens of a batch that says its ``input_ids``; None: it has none."""
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
    return ids if isinstance(ids, torch.Tensor) and ids.ndim > 1 else None


def _note(batch: Any, tokens: int | None) -> str:
    """Return what a sample is, where that decides the memory: a batch's own length."""
    ids = _ids_of(batch)
    if ids is None:
        note = "samples are like those of the first batch of the data"
        unused = "; --seq-len is for batches that have input_ids, and this one has none"
        return note if tokens is None else note + unused
    if tokens is not None:
        return f"each sample has {tokens:,} tokens"
    return f"each sample has {ids.shape[1]:,} tokens, as in the first batch of the data"
