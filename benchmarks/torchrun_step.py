"""A plain program for ``torchrun``: what ``step_overhead.py`` and ``strategies.py`` compare with.

It knows nothing of fsdp_magic. The loop is the one a person would write: a DataLoader with a
DistributedSampler, forward, backward, the norm of the gradient by torch's own function, AdamW,
and both numbers read each step. The model is spread with what torch has for a strategy: FSDP2,
DDP, DDP with ZeroRedundancyOptimizer. The model and the data are used by both sides.

Its arguments are a socket's path and a strategy. It stays alive: a request on its socket is
``{"steps": K}``, the answer holds the time that the K steps took on this rank, and the numbers of
each of them.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from transformers import GPT2Config, GPT2LMHeadModel

MICRO_BATCH_SIZE = 8
SEQUENCE_LENGTH = 64
SAMPLES = 1024
LEARNING_RATE = 3e-4
_VOCABULARY = 1000


def build_model() -> GPT2LMHeadModel:
    """Return a small GPT-2, the same in every process."""
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=4, n_embd=128, n_head=4, vocab_size=_VOCABULARY, n_positions=SEQUENCE_LENGTH,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config).train()


def build_data() -> list[torch.Tensor]:
    """Return random sequences, the same in every process."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, _VOCABULARY, (SAMPLES, SEQUENCE_LENGTH), generator=generator)
    return list(tokens)


def batches() -> Iterator[torch.Tensor]:
    """Yield this rank's micro-batches, epoch after epoch."""
    data = build_data()
    sampler = DistributedSampler(data, shuffle=False)  # type: ignore[arg-type]
    loader = DataLoader(data, batch_size=MICRO_BATCH_SIZE, sampler=sampler)  # type: ignore[arg-type]
    while True:
        yield from loader


def total_norm(model: torch.nn.Module) -> float:
    """Return the norm of the whole gradient."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    return (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()


def spread(model: GPT2LMHeadModel, strategy: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Spread a model with torch's own means, and return it with its optimizer."""
    if strategy in ("ddp", "zero1"):
        replica = DistributedDataParallel(model)
        if strategy == "ddp":
            return replica, torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
        return replica, ZeroRedundancyOptimizer(
            model.parameters(), optimizer_class=torch.optim.AdamW, lr=LEARNING_RATE
        )
    mesh = _mesh(strategy)
    for block in model.transformer.h:
        fully_shard(block, mesh=mesh, reshard_after_forward=strategy != "shard_grad_op")
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    return model, torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)


def _mesh(strategy: str) -> DeviceMesh:
    ranks = dist.get_world_size()
    if strategy == "hybrid_shard":  # replicas of whole models, as few ranks as there are here
        return init_device_mesh("cpu", (ranks, 1), mesh_dim_names=("replicate", "shard"))
    return init_device_mesh("cpu", (ranks,))


def main() -> None:
    """Shard the model, then take steps whenever the socket asks for some."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(sys.argv[1])
    channel = connection.makefile("rw")

    dist.init_process_group("gloo")
    model, optimizer = spread(build_model(), sys.argv[2])
    source = batches()

    answer: dict[str, object] = {"pid": os.getpid()}
    while True:
        channel.write(json.dumps(answer) + "\n")
        channel.flush()
        line = channel.readline()
        if not line:
            break
        started, losses, norms = time.monotonic(), [], []
        for _ in range(json.loads(line)["steps"]):
            batch = next(source)
            loss = model(input_ids=batch, labels=batch).loss
            loss.backward()
            norms.append(total_norm(model))
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        answer = {"seconds": time.monotonic() - started, "losses": losses, "norms": norms}
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
