"""ENGINE: the verbs that follow a failed cell: new transports, and back to a snapshot."""

from __future__ import annotations

from fsdp_magic.core.protocol import RecoverRequest
from fsdp_magic.core.recovery import RecoverReport, RestoreRequest
from fsdp_magic.core.reply import Reply
from fsdp_magic.engine.optimizer_steps import STEPS
from fsdp_magic.engine.parallel.zero1 import complete_updates
from fsdp_magic.engine.state import State


def recover(engine: State, request: RecoverRequest) -> Reply:
    """Replace the transports and forget the step that was torn.

    Collective: every rank must call this.
    """
    engine.world.reconnect(request.generation, replaced=request.replaced)
    if request.replaced:
        engine.meet_fresh_ranks(request.replaced)
    for sharded in engine.living_models():
        sharded.forget_iteration()
    if not request.replaced:  # else no model is left
        complete_updates(engine.living_models(), engine.world)
    engine.give_memory_back()
    report = RecoverReport(
        steps=engine.steps,
        optimizer_steps=STEPS.counts(),
        some_within_step=STEPS.some_within_step,
    )
    return Reply(rank=engine.world.rank, report=report)


def restore(engine: State, request: RestoreRequest) -> Reply:
    """Put everything back to the newest snapshot; the report says which.

    Collective: every rank must call this.
    """
    return Reply(rank=engine.world.rank, report=engine.restoration.restore())
