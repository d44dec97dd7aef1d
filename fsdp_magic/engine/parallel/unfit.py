"""ENGINE: what in a model would be lost without a word if it were sharded, refused by name."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from fsdp_magic.core.errors import FsdpError


def refuse_lossy(module: nn.Module, name: str) -> None:
    """Raise if sharding would drop something that a model does to its own parameters.

    Raises:
        FsdpError: at a hook on a parameter, which the gathered one does not have; at an embedding
            that writes into its weight in forward, or whose gradient is sparse.
    """
    for dotted, parameter in module.named_parameters():
        hooks = (parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None))
        if any(hooks):
            raise FsdpError(
                f"{name}.{dotted} has a gradient hook, which its shards cannot keep; put it into "
                "the model's forward (weight * mask, say), or remove it before %%fsdp_model"
            )
    _refuse_embeddings(module, name)


def refuse_unfit_when_whole(module: nn.Module, name: str) -> None:
    """Raise if ranks that hold a model whole would not keep it the same.

    Raises:
        FsdpError: at a hook that takes a gradient before it is that of all ranks; at an embedding
            that writes into its weight in forward, or whose gradient is sparse.
    """
    for dotted, parameter in module.named_parameters():
        if getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise FsdpError(
                f"{name}.{dotted} has a hook that runs when its gradient is there, and that is not "
                "yet the gradient of all ranks; remove it before %%fsdp_model"
            )
    _refuse_embeddings(module, name)


def _refuse_embeddings(module: nn.Module, name: str) -> None:
    for dotted, part in module.named_modules():
        if not isinstance(part, (nn.Embedding, nn.EmbeddingBag)):
            continue
        place = f"{name}.{dotted}" if dotted else name
        if part.max_norm is not None:
            raise FsdpError(
                f"{place} has max_norm, which writes into the weight in forward, and that is lost "
                "on shards; leave max_norm out and scale the weight in --after-step"
            )
        if part.sparse:
            raise FsdpError(
                f"{place} has sparse gradients, which cannot be cut into shards; make it with "
                "sparse=False"
            )


def refuse_shared_between(modules: Mapping[str, nn.Module]) -> None:
    """Raise if models that are sharded one by one share a parameter: they would be untied.

    Raises:
        FsdpError: naming both.
    """
    holders: dict[int, tuple[str, str]] = {}
    for name, module in modules.items():
        for dotted, parameter in module.named_parameters():
            other, place = holders.setdefault(id(parameter), (name, dotted))
            if other != name:
                raise FsdpError(
                    f"{name} and {other} share a parameter ({name}.{dotted} is {other}.{place}), "
                    "and models that are sharded one by one cannot; hold both in one nn.Module "
                    "and bind that alone"
                )
