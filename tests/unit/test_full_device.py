"""What a person reads of a full device, and what to try."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from fsdp_magic.core.reply import Failure, OutOfMemory
from fsdp_magic.core.specs import TrainSpec
from fsdp_magic.core.units import GIB, MIB
from fsdp_magic.engine import out_of_memory
from fsdp_magic.engine.out_of_memory import advice_for, advice_for_training, forget_graphs
from fsdp_magic.panels import errors


def full(**changed: Any) -> Failure:
    values: dict[str, Any] = {
        "where": "in the forward of line 3 (logits = model(batch))",
        "asked_bytes": 512 * MIB,
        "allocated_bytes": int(1.7 * GIB),
        "used_bytes": int(1.7 * GIB),
        "capacity_bytes": 2 * GIB,
        "advice": "try --micro-batch-size 4 --accumulate 2 (the same step)",
        **changed,
    }
    return Failure(
        kind="out_of_memory",
        exception_type="RuntimeError",
        message="DefaultCPUAllocator",
        traceback='  File "<%%fsdp_train [3]>", line 3',
        memory=OutOfMemory(**values),
    )


def test_a_full_device_is_one_line_with_the_numbers_and_what_to_try() -> None:
    assert errors.text({1: full()}, released=(0,)) == (
        "rank 1 ran out of memory in the forward of line 3 (logits = model(batch)): 512 MiB were "
        "asked for, 1.7 GiB of 2.0 GiB allocated; try --micro-batch-size 4 --accumulate 2 (the "
        "same step)\nrank 0 released, because a peer failed"
    )


def test_ranks_that_were_full_at_the_same_place_stand_together() -> None:
    others = full(asked_bytes=1, allocated_bytes=2), full(where="in the backward")
    lines = errors.text({0: full(), 1: others[0], 2: others[1]}).splitlines()
    assert lines[0].startswith("ranks 0-1 ran out of memory in the forward")
    assert lines[2].startswith("rank 2 ran out of memory in the backward: 512 MiB")


def test_what_other_processes_use_is_told_where_it_is_much() -> None:
    text = errors.text({0: full(allocated_bytes=GIB, used_bytes=3 * GIB, asked_bytes=None)})
    assert ": more was asked for, 1.0 GiB of 2.0 GiB allocated, 2.0 GiB used; try" in text


def test_a_line_of_the_cell_steers_no_terminal() -> None:
    assert "\x1b" not in errors.text({0: full(where="in line 1 (\x1b[31mx)")})


@pytest.mark.parametrize(
    ("message", "asked"),
    [
        ("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: you "
         "tried to allocate 419430400 bytes. Error code 12", 419430400),
        ("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total", 20 * MIB),
        ("Unable to allocate 400. MiB for an array with shape (52428800,)", 400 * MIB),
        ("std::bad_alloc", None),
    ],
)  # fmt: skip
def test_what_was_asked_for_is_read_from_the_message(message: str, asked: int | None) -> None:
    assert out_of_memory._asked_bytes(message) == asked
    error = MemoryError(message) if "Unable" in message else RuntimeError(message)
    assert out_of_memory.is_out_of_memory(error)


def test_a_lost_connection_is_not_out_of_memory() -> None:
    assert not out_of_memory.is_out_of_memory(RuntimeError("[gloo] Connection closed by peer"))


@pytest.mark.parametrize(
    ("options", "size", "accumulate", "strategy", "advice"),
    [
        ({}, 8, 1, "full_shard", "try --micro-batch-size 4 --accumulate 2 (the same step)"),
        ({}, 6, 3, "full_shard", "try --micro-batch-size 3 --accumulate 6 (the same step)"),
        ({}, 7, 1, "full_shard", "try --micro-batch-size 1 --accumulate 7 (the same step)"),
        ({"global_batch_size": 64}, 8, 4, "full_shard",
         "try --micro-batch-size 4 (the same step)"),
        ({}, 1, 1, "full_shard",
         "try more ranks (%fsdp_init -n 4 --restart) or a smaller model"),
        ({}, 1, 1, "shard_grad_op",
         "try %%fsdp_model --strategy full_shard, more ranks (%fsdp_init -n 4 --restart) or a "
         "smaller model"),
        ({}, None, 1, "full_shard",
         "try smaller batches in the data, more ranks (%fsdp_init -n 4 --restart) or a smaller "
         "model"),
    ],
)  # fmt: skip
def test_the_advice_fits_the_run(
    options: dict[str, Any], size: int | None, accumulate: int, strategy: str, advice: str
) -> None:
    spec = TrainSpec(data="data", **options)
    said = advice_for_training(
        spec, micro_batch_size=size, accumulate=accumulate, strategy=strategy, ranks=2
    )
    assert said == advice


def test_the_advice_fits_the_verb() -> None:
    assert "micro-batch-size" in advice_for("evaluate", strategy="full_shard", ranks=2)
    assert "more ranks" in advice_for("model", strategy="full_shard", ranks=2)
    assert "del NAME" in advice_for("run", strategy="full_shard", ranks=2)


def test_names_of_a_failed_step_lose_their_graph() -> None:
    graph = torch.ones(2, requires_grad=True) * 2
    leaf, outputs = torch.ones(2, requires_grad=True), {"logits": graph}
    namespace = {"h": graph, "leaf": leaf, "outputs": outputs, "count": 3}
    forget_graphs(namespace, ["h", "leaf", "outputs", "count", "never_bound"])
    assert namespace["leaf"] is leaf
    assert namespace["count"] == 3
    assert namespace["h"].grad_fn is None
    assert torch.equal(namespace["h"], graph)
    assert "outputs" not in namespace


def test_the_persons_own_words_are_kept() -> None:
    own = replace(full(asked_bytes=None), message="mine", exception_type="MemoryError")
    assert errors.text({0: own}).splitlines()[1:] == ["MemoryError: mine"]
