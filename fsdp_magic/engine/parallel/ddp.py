"""ENGINE: data parallelism, ``ddp``: every rank holds parameters, gradients and state whole."""

from __future__ import annotations

from torch import nn

from fsdp_magic.core.errors import FsdpError
from fsdp_magic.core.specs import ModelSpec
from fsdp_magic.engine.parallel.casting import compute_in
from fsdp_magic.engine.parallel.precision import compute_dtype
from fsdp_magic.engine.parallel.rank_zero import build_as_rank_0
from fsdp_magic.engine.parallel.unfit import refuse_unfit_when_whole
from fsdp_magic.engine.parallel.whole_model import WholeModel
from fsdp_magic.engine.parallel.wrapping import Units
from fsdp_magic.engine.world import World


def replicate(
    module: nn.Module, *, name: str, spec: ModelSpec, world: World, units: Units
) -> tuple[WholeModel, dict[int, nn.Parameter]]:
    """Spread a model over the ranks, in place: each has all of it.

    Collective: every rank must call this.

    Args:
        module: the model; the same on every rank, or rank 0's is taken.
        name: what it is bound to.
        spec: how.
        world: over whom.
        units: what is cast together, if it computes in low precision.

    Returns:
        The spread model, and no parameter: none is replaced.
    """
    notes = make_alike(module, name=name, world=world)
    if (dtype := compute_dtype(spec)) is not None:
        compute_in(module, units, dtype)
    model = WholeModel(module, name=name, spec=spec, world=world)
    model.notes += notes
    return model, {}


def make_alike(module: nn.Module, *, name: str, world: World) -> list[str]:
    """Give every rank rank 0's weights and buffers, on its device.

    Collective: every rank must call this.

    Returns:
        A sentence, if they differed.
    """
    named = [*module.named_parameters(), *module.named_buffers()]
    empty = next((dotted for dotted, tensor in named if tensor.is_meta), None)
    if empty is not None:
        raise FsdpError(
            f"{name} is on the meta device, without weights (first: {empty}); build it on the CPU"
        )
    refuse_unfit_when_whole(module, name)
    module.to(world.device)
    named = [*module.named_parameters(), *module.named_buffers()]
    return build_as_rank_0(named, name=name, world=world)
