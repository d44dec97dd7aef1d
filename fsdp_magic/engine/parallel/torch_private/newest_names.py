"""ENGINE: collectives by their newest names: torch 2.13 warns of the earlier ones."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def all_gather_single(output: torch.Tensor, part: torch.Tensor, *, group: Any) -> None:
    """Gather what each rank has into one tensor.

    Collective: every rank must call this.

    Args:
        output: flat, as long as the parts of all ranks.
        part: of this rank, flat.
        group: the ranks.
    """
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(output, part, group=group)
