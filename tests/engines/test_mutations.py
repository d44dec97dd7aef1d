"""A wrong gradient must not pass: the code is broken on purpose in a living world.

Each mutation is put into the engines' own process, the equality test of ``test_equality`` is
run there, and must fail. Then it is taken out again and the test must pass.
"""

from __future__ import annotations

from functools import cache

import pytest
from equality import Case, Trajectory, assert_equal, on_engines, single_process
from loops import check_equal
from test_loss_weights import MEAN, OPTIONS, TOKENS, WEIGHTED, loop_of, over_tokens

from fsdp_magic.errors import CellFailedError

CASE = Case()

SAVE = """
from fsdp_magic.engine import (
    feeding, gradients, modeling, optimizers, step, trained, used, weights,
)
from fsdp_magic.engine import data as data_module
from fsdp_magic.engine.parallel import fsdp as fsdp_module
_originals = [
    (step.AutomaticStep, "_backward"), (fsdp_module, "_set_divide_factor"),
    (gradients, "clip"), (gradients, "measure"), (gradients, "scale"), (gradients, "reduce_whole"),
    (gradients, "without_the_uncounted"), (optimizers, "repoint"), (used.Used, "settle"),
    (weights.Weighing, "known"), (weights, "label_count"), (step, "weighted"),
    (data_module.Data, "take"), (feeding, "_cut"),
]
_originals = [(owner, name, getattr(owner, name)) for owner, name in _originals]
world_size_ = world_size
"""
RESTORE = """
for owner, name, value in _originals:
    setattr(owner, name, value)
modeling.repoint = trained.repoint = optimizers.repoint
"""

MUTATIONS = {
    "gradient x world": """
def _set(model, factor, _o=fsdp_module._set_divide_factor):
    _o(model, 1 / world_size_)
fsdp_module._set_divide_factor = _set
""",
    "gradient / world": """
def _set(model, factor, _o=fsdp_module._set_divide_factor):
    _o(model, float(world_size_))
fsdp_module._set_divide_factor = _set
""",
    "gradient x accumulation": """
def _backward(self, loss, weight, _o=step.AutomaticStep._backward):
    _o(self, loss, weight * 4)
step.AutomaticStep._backward = _backward
""",
    "a micro-batch's weight wrong": """
def _backward(self, loss, weight, _o=step.AutomaticStep._backward):
    _o(self, loss, weight * (1.1 if self.runner._names.namespace["micro_step"] == 1 else 1.0))
step.AutomaticStep._backward = _backward
""",
    "one rank's weight wrong": """
def _backward(self, loss, weight, _o=step.AutomaticStep._backward):
    _o(self, loss, weight * (1.01 if self.world.rank == 1 else 1.0))
step.AutomaticStep._backward = _backward
""",
    "a micro-step's gradient lost": """
def _backward(self, loss, weight, _o=step.AutomaticStep._backward):
    _o(self, loss, weight if self.runner._names.namespace["micro_step"] else 0.0)
step.AutomaticStep._backward = _backward
""",
    "the last micro-step only": """
def _backward(self, loss, weight, _o=step.AutomaticStep._backward):
    gradients.clear(self.trained.parameters)
    _o(self, loss, weight)
step.AutomaticStep._backward = _backward
""",
    "decay dropped": """
def repoint(optimizer, replaced, _o=optimizers.repoint):
    _o(optimizer, replaced)
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.0
modeling.repoint = repoint
""",
    "groups merged": """
def repoint(optimizer, replaced, _o=optimizers.repoint):
    _o(optimizer, replaced)
    first, *rest = optimizer.param_groups
    for group in rest:
        first["params"] = first["params"] + group["params"]
    optimizer.param_groups[:] = [first]
modeling.repoint = repoint
""",
    "group's learning rate lost": """
def repoint(optimizer, replaced, _o=optimizers.repoint):
    _o(optimizer, replaced)
    for group in optimizer.param_groups:
        group["lr"] = optimizer.defaults["lr"]
modeling.repoint = repoint
""",
    "optimizer not re-pointed": """
modeling.repoint = trained.repoint = lambda optimizer, replaced: None
""",
    "one rank's data repeated": """
import dataclasses
def _cut(spec, namespace, world, _o=feeding._cut):
    return dataclasses.replace(_o(spec, namespace, world), rank=0)
feeding._cut = _cut
""",
    "the same micro-batch again": """
def take(self, _o=data_module.Data.take):
    taken = _o(self)
    taken.batches[:] = taken.batches[:1] * len(taken.batches)
    return taken
data_module.Data.take = take
""",
    "norm of this rank's shard only": """
import torch.distributed
def measure(parameters, *, world_size, weight, _o=gradients.measure):
    keep, torch.distributed.all_reduce = torch.distributed.all_reduce, lambda tensor: None
    try:
        return _o(parameters, world_size=world_size, weight=weight)
    finally:
        torch.distributed.all_reduce = keep
gradients.measure = measure
""",
    "whole parameters counted once a rank": """
def measure(parameters, *, world_size, weight, _o=gradients.measure):
    return _o(parameters, world_size=1, weight=weight)
gradients.measure = measure
""",
    "whole parameters not reduced": """
gradients.reduce_whole = lambda parameters: None
""",
    "clipped though not asked": """
def measure(parameters, *, world_size, weight, _o=gradients.measure):
    norm, total = _o(parameters, world_size=world_size, weight=weight)
    gradients.clip(parameters, norm, 0.5)
    return norm, total
gradients.measure = measure
""",
}

WEIGHT_MUTATIONS = {
    "late weights not divided by": """
gradients.scale = lambda parameters, factor: None
""",
    "late weights of this rank only": """
def measure(parameters, *, world_size, weight, _o=gradients.measure):
    norm, total = _o(parameters, world_size=world_size, weight=weight)
    return norm, torch.as_tensor(weight, dtype=torch.float64) * world_size_
gradients.measure = measure
""",
    "weights of the last micro-batch only": """
def measure(parameters, *, world_size, weight, _o=gradients.measure):
    return _o(parameters, world_size=world_size, weight=weight / 2)
gradients.measure = measure
""",
    "the loss's share not weighted": """
step.weighted = lambda value, weight: value
""",
    "labels counted as samples": """
weights.Weighing.known = lambda self, batches: batches.counts
""",
    "ignored labels counted": """
weights.label_count = lambda batch, *, shifted: batch["labels"].numel() + batch["labels"][0, 0] * 0
""",
    "labels shifted": """
def label_count(batch, *, shifted, _o=weights.label_count):
    return _o(batch, shifted=True)
weights.label_count = label_count
""",
}
_OF_LOSS_TOKENS = ("labels counted as samples", "ignored labels counted", "labels shifted")


@cache
def reference(case: Case) -> Trajectory:
    return single_process(case)


def case_for(mutation: str) -> Case:
    """Return the case that shows a mutation: whole parameters are in the plain model only."""
    if not mutation.startswith("whole"):
        return CASE
    from equality import PLAIN, PLAIN_CELL

    return Case(model=PLAIN, cell=PLAIN_CELL)


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_equality_catches(session, mutation):
    case = case_for(mutation)
    session.run(SAVE, show=False)
    session.run(MUTATIONS[mutation], show=False)
    # an optimizer of what was there before sharding is noticed by the run itself
    noticed = CellFailedError if mutation == "optimizer not re-pointed" else AssertionError
    try:
        with pytest.raises(noticed):
            assert_equal(on_engines(session, case, accumulate=4), reference(case), tolerance=1e-9)
    finally:
        session.run(RESTORE, show=False)


@pytest.mark.parametrize("mutation", WEIGHT_MUTATIONS)
def test_equality_catches_a_wrong_weight(session, mutation):
    tokens = mutation in _OF_LOSS_TOKENS
    session.run(f"import torch\n{SAVE}", show=False)
    session.run(WEIGHT_MUTATIONS[mutation], show=False)
    try:
        with pytest.raises(AssertionError):
            check_equal(
                session,
                TOKENS,
                MEAN if tokens else WEIGHTED,
                loop_of(over_tokens),
                micro_batch_size=4,
                accumulate=2,
                loss="tokens" if tokens else "mean",
                **OPTIONS,
            )
    finally:
        session.run(RESTORE, show=False)


def test_equality_holds_after_all_mutations(session):
    assert_equal(on_engines(session, CASE, accumulate=4), reference(CASE), tolerance=1e-9)
