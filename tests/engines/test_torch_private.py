"""The private names of torch that ``engine/parallel/torch_private`` needs are still there."""

from __future__ import annotations

import pytest

BUILD = """
import torch
from fsdp_magic.engine.parallel import torch_private

model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
"""
FORWARD = """
out = model(torch.ones(2, 4))
(name, unit), = torch_private.units(model)
state = unit._get_fsdp_state()
(group,) = torch_private.parameter_groups(unit)
parameter = group.fsdp_params[0]
shard = parameter.sharded_param.data
at_end, x = [], torch.ones(1, requires_grad=True)
def end_noted(gradient):
    number = torch_private.backward_number()
    torch_private.at_end_of_backward(lambda: at_end.append(number >= 0))
x.register_hook(end_noted)
x.sum().backward()
"""


@pytest.mark.parametrize(
    "expression",
    [
        "isinstance(state._is_root, bool)",
        "state._fsdp_param_groups == [group]",
        "hasattr(group, '_all_gather_result')",
        "isinstance(parameter._unsharded_param, torch.nn.Parameter)",
        "parameter.unsharded_accumulated_grad is None",
        "model.reset_iter_state() is None",
        "group.reduce_scatter_unused_params is True",
        "group.post_forward_mesh_info is None and group.reshard_after_backward is True",
        "group.is_sharded and not group.is_unsharded",
        "group._training_state.name == state._training_state.name == 'IDLE'",
        "[t.untyped_storage()._cdata > 0 for t in parameter.all_gather_outputs] == [True]",
        "parameter.mesh_info.shard_mesh_size == 2 and parameter.mesh_info.shard_mesh_rank < 2",
        "isinstance(parameter._module_info.module, torch.nn.Linear)",
        "state._state_ctx.all_states == [state] and state._state_ctx.iter_forward_root is None",
        "torch_private.state_reference(model)() is state",
        "callable(state._pre_backward) and callable(state._register_pre_backward_hook)",
        "state._state_ctx.post_backward_final_callback_queued is False",
        "callable(state._root_post_backward_final_callback)",
        "callable(torch.distributed.all_gather_single)",
        "callable(state._pre_forward) and callable(state._post_forward)",
        "isinstance(torch.distributed.distributed_c10d._world.group_count, int)",
        "hasattr(torch.autograd.graph, torch_private.BACKWARD_FUNCTION)",
        "torch_private.backward_number() == -1 and at_end == [True]",
        "torch.equal(torch_private.shard_like(shard.to_local(), shard).to_local(), "
        "shard.to_local())",
    ],
)
def test_a_private_name_is_where_it_was(session, expression):
    session.model(BUILD, show=False)
    session.run(FORWARD, show=False)
    assert session.pull(expression, rank="all") == [True, True]


def test_the_gathered_parameter_leads_to_its_shard(session):
    session.model(BUILD, show=False)
    session.run(FORWARD, show=False)
    assert session.pull(
        "torch_private.sharded_of_unsharded(model)[id(parameter._unsharded_param)] is "
        "parameter.sharded_param"
    )


READINGS = {
    "weight.sum().item()": "whole.sum().item()",
    "float(weight.sum())": "float(whole.sum())",
    "weight.norm().item()": "whole.norm().item()",
    "weight.max().item()": "whole.max().item()",
    "bool(weight.sum() > whole.sum() - 1e-3)": "True",
    "weight.mean().item()": "whole.mean().item()",
    "int(weight.abs().sum() * 100)": "int(whole.abs().sum() * 100)",
    "weight[0, 0].item()": "whole[0, 0].item()",
    "weight.grad.norm().item()": "whole_gradient.norm().item()",
}


@pytest.mark.parametrize("reading", READINGS)
def test_a_number_read_from_a_sharded_tensor_is_whole(session, reading):
    """It fails when torch moves ``_op_dispatcher._custom_op_handlers``."""
    session.model(BUILD, show=False)
    session.run(
        "model(torch.ones(2, 4)).sum().backward()\n"
        "weight = model[1].weight\n"
        "whole, whole_gradient = weight.full_tensor(), weight.grad.full_tensor()",
        show=False,
    )
    ours = session.pull(reading, rank="all")
    assert ours == [pytest.approx(session.pull(READINGS[reading]), rel=1e-5)] * 2


STEPS = """
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

class Dispatched(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        on_shards.append(DTensor in types)
        return function(*args, **kwargs or {})

on_shards, optimizer = [], torch.optim.AdamW(model.parameters())
for _ in range(2):
    model(torch.ones(2, 4)).sum().backward()
    on_shards.clear()
    with Dispatched():
        optimizer.step()
"""


@pytest.mark.parametrize("strategy", ["full_shard", "zero1"])
def test_optimizers_step_without_dispatching_on_shards(session, strategy):
    session.model(BUILD, strategy=strategy, show=False)
    session.run(STEPS, show=False)
    for on_shards in session.pull("on_shards", rank="all"):
        assert len(on_shards) > 10
        assert not any(on_shards)


LOADER = """
import time
from torch.utils.data import DataLoader

class Slow:
    def __len__(self):
        return 64

    def __getitem__(self, index):
        if index > 1:
            time.sleep(60)
        return index

iterator = iter(DataLoader(Slow(), batch_size=1, num_workers=2))
next(iterator)
started = time.monotonic()
torch_private.shut_down_workers(iterator)
took = time.monotonic() - started
"""


def test_workers_that_are_busy_are_ended_soon_and_without_an_error(session):
    session.model(BUILD, show=False)
    session.run(LOADER, show=False)
    assert session.pull("took") < 2.0
    session.run("torch_private.shut_down_workers(iterator)\ntime.sleep(0.1)", show=False)
    assert not session.pull("any(worker.is_alive() for worker in iterator._workers)")
