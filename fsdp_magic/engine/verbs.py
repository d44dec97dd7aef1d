"""ENGINE: what the kernel can ask of an engine, and what an engine keeps between cells.

``Engine.call(verb, request)`` is the only door. It never raises: whatever happens becomes a
``Failure`` in the ``Reply``, because an exception that ipyparallel saw would keep its frames,
and with them the tensors of a failed cell.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from ipyparallel.engine.app import IPEngine
from torch.optim import Optimizer

from fsdp_magic.core.completion import CompleteRequest
from fsdp_magic.core.errors import FsdpError
from fsdp_magic.core.protocol import (
    LOCAL_ORDER_VARIABLE,
    ConsoleRequest,
    EvalRequest,
    HelloRequest,
    JoinRequest,
    ModelRequest,
    RunRequest,
    ShardsRequest,
    StatusRequest,
    TrainRequest,
)
from fsdp_magic.core.reply import EvalReport, HelloReport, ModelReport, Reply
from fsdp_magic.engine import (
    bundles,
    cells,
    completion,
    memory_limit,
    modeling,
    out_of_memory,
    telemetry,
    training,
)
from fsdp_magic.engine.comparison import compare, put_back, set_aside
from fsdp_magic.engine.console import bind_names, open_console
from fsdp_magic.engine.evaluation import Evaluator
from fsdp_magic.engine.interrupts import INTERRUPTS
from fsdp_magic.engine.parallel.meta import parameters_on_meta
from fsdp_magic.engine.parallel.pretrained import MAPPED
from fsdp_magic.engine.parallel.zero1 import gather_written
from fsdp_magic.engine.planning.session import built, plan
from fsdp_magic.engine.printing import PRINTING
from fsdp_magic.engine.reachable import reachable
from fsdp_magic.engine.recovery import recover, restore
from fsdp_magic.engine.state import State
from fsdp_magic.engine.status import rank_status
from fsdp_magic.engine.tuning import hold, room
from fsdp_magic.engine.variables import number, pull, push
from fsdp_magic.engine.weights import Weighing
from fsdp_magic.engine.world import World


class Engine(State):
    """An engine, which the kernel asks for verbs."""

    def call(self, verb: str, request: Any) -> Reply:
        """Do what the kernel asks.

        Args:
            verb: a key of ``VERBS``.
            request: the verb's request.
        """
        rank = -1 if self._world is None else self._world.rank
        try:
            if verb not in _WITHIN_COMPARISON:
                self.end_comparison()  # nobody came to end it
            with PRINTING.cell(getattr(request, "name", verb)):
                return VERBS[verb](self, request)
        except BaseException as error:  # the kernel must get an answer whatever happened
            INTERRUPTS.close()
            with cells.forgotten(error):
                failure = self.failure(error, verb)
            return Reply(rank=rank, failure=self.with_held(failure, getattr(request, "code", "")))
        finally:
            INTERRUPTS.close()


def hello(engine: Engine, request: HelloRequest) -> Reply:
    """Say who this engine is."""
    report = HelloReport(
        host=socket.gethostname(),
        pid=os.getpid(),
        local_order=int(os.environ.get(LOCAL_ORDER_VARIABLE, "0")),
        torch_version=str(torch.__version__),
    )
    return Reply(rank=-1, report=report)


def join(engine: Engine, request: JoinRequest) -> Reply:
    """Take a rank.

    Collective: every rank must call this.
    """
    engine.enter(World(request))
    PRINTING.directory, PRINTING.rank = Path(request.directory), request.rank
    if request.replaced:
        engine.meet_fresh_ranks(request.replaced)
    telemetry.prepare(request)
    if request.memory_limit_bytes is not None:
        memory_limit.fix(request.memory_limit_bytes)
    return Reply(rank=request.rank)


def run(engine: Engine, request: RunRequest) -> Reply:
    """Run a cell as ordinary Python; the report is its ``ResultReport``."""
    with (
        engine.world.groups.only(request.ranks),
        engine.cell(engine.names_of_cells(), code=request.code),
        INTERRUPTS.allowed(),
    ):
        cell = cells.compile_cell(request.code, request.name, shell=engine.shell)
        engine.lost_models.refuse(cell.used)
        result = bundles.result_of(cell.run(engine.namespace), shell=engine.shell)
        if request.ranks is None or len(request.ranks) == engine.world.world_size:
            gather_written(engine.living_models())
    return Reply(rank=engine.world.rank, report=result)


def model(engine: Engine, request: ModelRequest) -> Reply:
    """Run a cell, then shard what it built and re-point the optimizers.

    Collective: every rank must call this.
    """
    with engine.cell(engine.names_of_cells(), code=request.code), MAPPED.in_place():
        with INTERRUPTS.allowed():
            cell = cells.compile_cell(request.code, request.name, shell=engine.shell)
            engine.lost_models.refuse(cell.used)
            with parameters_on_meta() if request.spec.meta else nullcontext():
                result = bundles.result_of(cell.run(engine.namespace), shell=engine.shell)
            wanted, left = modeling.wanted_modules(
                engine.namespace, request.spec, assigned=cell.assigned, models=engine.models
            )
        with out_of_memory.half_built_is_forgotten(engine.namespace, cell.assigned):
            placements = modeling.shard_all(
                wanted, request.spec, engine.namespace, models=engine.models, world=engine.world
            )
        restored = None
        if wanted:
            engine.start_anew()
            if request.restore:
                restored = engine.restoration.restore_models(wanted)
            else:
                engine.restoration.forget()
                engine.snapshots.forget()
        shown = placements or tuple(model.placement() for model in left)
    notes = tuple(
        f"{model.name} is sharded already and is left alone; build a new one to shard it anew"
        for model in left
    )
    report = ModelReport(
        placements=shown,
        starts_anew=bool(wanted),
        result=result,
        notes=notes,
        restored=restored,
    )
    return Reply(rank=engine.world.rank, report=report)


def train(engine: Engine, request: TrainRequest) -> Reply:
    """Run a cell as training steps.

    Collective: every rank must call this.
    """
    run = training.TrainingRun(
        request, world=engine.world, names=engine.names, handle=engine.handle
    )
    kept = not request.spec.trial
    values = {**engine.names_of_cells(), **run.names()}
    cell: cells.Cell | None = None
    try:
        with engine.training_cell(values, code=request.code, kept=kept, tick=run.tick), run:
            cell = cells.compile_training_cell(request.code, request.name, shell=engine.shell)
            engine.lost_models.refuse(cell.used)
            asked = request.evaluation
            run.prepare(
                cell,
                evaluation_cell=None
                if asked is None
                else cells.compile_training_cell(asked.code, asked.name, shell=engine.shell),
                kept=engine,
            )
            run.steps()
    except BaseException as error:
        INTERRUPTS.close()
        with cells.forgotten(error):
            failure = engine.failure(error, "train", advice=run.advice)
        if failure.kind == "out_of_memory" and cell is not None:
            out_of_memory.forget_graphs(engine.namespace, cell.assigned)
        failure = engine.with_held(failure, request.code)
        return Reply(rank=engine.world.rank, report=run.report(), failure=failure)
    finally:
        if kept:
            engine.steps += run.finished
            engine.epoch = run.epoch
    return Reply(rank=engine.world.rank, report=run.report())


def evaluate(engine: Engine, request: EvalRequest) -> Reply:
    """Run a cell over data without gradients.

    Collective: every rank must call this.
    """
    started = time.monotonic()
    names = {
        "step": engine.steps,
        "micro_step": 0,
        "epoch": engine.epoch,
        "micro_batch_size": request.spec.micro_batch_size,
        "total_steps": None,
    }
    if request.spec.data is not None:
        names["batch"] = None
    with engine.training_cell({**engine.names_of_cells(), **names}, code=request.code, kept=False):
        cell = cells.compile_training_cell(request.code, request.name, shell=engine.shell)
        engine.lost_models.refuse(cell.used)
        evaluator = Evaluator(
            cell=cell,
            spec=request.spec,
            weighing=Weighing("mean", late="loss_weight" in cell.assigned),
            names=engine.names,
            world=engine.world,
            models=engine.living_models(),
        )
        record = evaluator.run(step=engine.steps, epoch=engine.epoch)
    assert record is not None  # only a training run is asked to stop in between
    report = EvalReport(
        record=record,
        rows=tuple(evaluator.rows),
        seconds=time.monotonic() - started,
        notes=tuple(evaluator.notes),
    )
    return Reply(rank=engine.world.rank, report=report)


def shards(engine: Engine, request: ShardsRequest) -> Reply:
    """Describe where the parameters of a sharded model live."""
    name = request.model or next(reversed(engine.models), "")
    found = engine.models.get(name)
    if found is None:
        known = ", ".join(engine.models) or "none; build one in %%fsdp_model"
        raise FsdpError(f"no sharded model {name!r}; there is {known}".replace("''", "yet"))
    return Reply(rank=engine.world.rank, report=found.placement())


def status(engine: Engine, request: StatusRequest) -> Reply:
    """Describe this rank."""
    models = engine.living_models()
    report = rank_status(
        engine.world,
        parameters=[p for model in models for p in model.module.parameters()],
        optimizers=list(reachable(engine.namespace, Optimizer).values()),
        models=modeling.bound_names(engine.models, engine.namespace),
        steps=engine.steps,
    )
    return Reply(rank=engine.world.rank, report=report)


def complete(engine: Engine, request: CompleteRequest) -> Reply:
    """Say what may stand at the end of a line."""
    report = completion.completions(
        engine.shell, request.line, names=engine.names_of_cells(), seconds=request.seconds
    )
    return Reply(rank=engine.world.rank, report=report)


def console(engine: Engine, request: ConsoleRequest) -> Reply:
    """Listen for a console; the report is its connection file."""
    path = Path(engine.world.request.directory, f"console-{engine.world.rank}.json")
    if not path.exists():
        bind_names(engine.shell.kernel, engine.names, engine.names_of_cells)
        open_console(IPEngine.instance(), path)
    return Reply(rank=engine.world.rank, report=str(path))


VERBS: dict[str, Callable[[Engine, Any], Reply]] = {
    "hello": hello,
    "join": join,
    "run": run,
    "model": model,
    "train": train,
    "evaluate": evaluate,
    "shards": shards,
    "push": push,
    "pull": pull,
    "number": number,
    "status": status,
    "complete": complete,
    "console": console,
    "recover": recover,
    "restore": restore,
    "set_aside": set_aside,
    "room": room,
    "hold": hold,
    "compare": compare,
    "put_back": put_back,
    "built": built,
    "plan": plan,
}
_WITHIN_COMPARISON = ("compare", "put_back", "recover", "restore")
