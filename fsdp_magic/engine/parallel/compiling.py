"""ENGINE: ``--compile``: the forward of each block through ``torch.compile``.

The forward alone is compiled: gathering, casting and checkpointing lie around it and run as they
are written. Blocks that are alike share what is compiled. The first step takes as long as the
compiler does; a batch of another size compiles once more, for sizes of any kind.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence

import torch
import torch._dynamo
from torch import nn

from fsdp_magic.core.errors import FsdpError
from fsdp_magic.core.specs import ModelSpec
from fsdp_magic.engine.parallel.blocks import repeated_blocks
from fsdp_magic.engine.parallel.forwards import Forward, Order, lay_around

BACKEND = "inductor"
"""Tests take one that needs no compiler."""
_COMPILERS = ("g++", "clang++", "c++")
_SPARE_RECOMPILES = 8


def refuse_unfit(spec: ModelSpec) -> None:
    """Raise if there is no compiler for what torch would write.

    Raises:
        FsdpError: saying how to get one.
    """
    if not spec.compile or BACKEND != "inductor":
        return
    wanted = os.environ.get("CXX")
    if not any(map(shutil.which, [wanted] if wanted else _COMPILERS)):
        named = f"CXX={wanted} is not there" if wanted else "there is none on this machine"
        raise FsdpError(
            f"--compile needs a C++ compiler, and {named}; install one (apt-get install g++), or "
            "leave --compile out"
        )


def apply(module: nn.Module, units: Sequence[tuple[nn.Module, ...]], spec: ModelSpec) -> list[str]:
    """Let the blocks of a model be compiled at their first forward, in place, if asked for.

    Args:
        module: the model, before it is sharded.
        units: what is gathered at once.
        spec: how.

    Returns:
        Sentences a person should read.
    """
    if not spec.compile:
        return []
    torch.compiler.reset()  # what earlier models were compiled to
    blocks = repeated_blocks(module) or [m for unit in units for m in unit] or [module]
    for block in blocks:
        lay_around(block, Order.COMPILED, _compiled)
    # a block that reads its own number is compiled for each
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, len(blocks) + _SPARE_RECOMPILES)
    many = "1 block is" if len(blocks) == 1 else f"{len(blocks)} blocks are"
    return [f"{many} compiled in the first step, which takes longer, often half a minute"]


def _compiled(function: Forward) -> Forward:
    compiled: Forward = torch.compile(function, backend=BACKEND)
    return compiled
