"""Data: every sample once, on one rank; the same steps on every rank."""

from __future__ import annotations

import pytest

from fsdp_magic.errors import CellFailedError

MODEL = """
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

torch.manual_seed(0)
model = torch.nn.Linear(1, 1).double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
seen = []

class Numbers(Dataset):
    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if not 0 <= index < self.length:
            raise IndexError(index)
        return torch.tensor([float(index)], dtype=torch.float64)
"""
CELL = "seen.append((epoch, [int(x) for x in batch.flatten()]))\nloss = model(batch).pow(2).mean()"


def samples_by_epoch(session, ranks=2):
    """Return for each epoch what each rank took, in order."""
    epochs: dict[int, list[list[int]]] = {}
    for rank in range(ranks):
        for epoch, batch in session.pull("seen", rank=rank):
            epochs.setdefault(epoch, [[] for _ in range(ranks)])[rank].extend(batch)
    return epochs


@pytest.fixture
def prepared(session):
    session.model(MODEL, show=False)
    return session


@pytest.mark.parametrize(
    "data",
    [
        "Numbers(64)",
        "[torch.tensor([float(i)], dtype=torch.float64) for i in range(64)]",
        "DataLoader(Numbers(64), batch_size=4, shuffle=True)",
        "DataLoader(Numbers(64), batch_size=4, shuffle=True, num_workers=2)",
        "DataLoader(Numbers(64), batch_size=4, sampler=torch.utils.data.WeightedRandomSampler("
        "[1.0] * 64, 64, replacement=False))",
    ],
    ids=["map-style", "list", "loader", "workers", "sampler"],
)
def test_an_epoch_gives_every_sample_to_one_rank_in_an_order_of_its_own(prepared, data):
    prepared.run(f"data = {data}", show=False)
    run = prepared.train(CELL, data="data", epochs=2, micro_batch_size=4, accumulate=2, show=False)
    assert run.steps == 8
    epochs = samples_by_epoch(prepared)
    assert sorted(epochs) == [0, 1]
    for ranks in epochs.values():
        assert sorted(ranks[0] + ranks[1]) == list(range(64))
        assert not set(ranks[0]) & set(ranks[1])
    assert epochs[0] != epochs[1]
    assert epochs[0][0] != sorted(epochs[0][0])


def test_a_global_batch_holds_the_same_samples_however_it_is_cut(prepared):
    prepared.run("data = Numbers(64)", show=False)
    together = []
    for size, accumulate in ((8, 1), (4, 2), (2, 4)):
        prepared.model(MODEL + "data = Numbers(64)", show=False)
        prepared.train(
            CELL, data="data", steps=2, micro_batch_size=size, accumulate=accumulate, show=False
        )
        epochs = samples_by_epoch(prepared)
        together.append([sorted(epochs[0][0][i : i + 8]) for i in (0, 8)])
    assert together[0] == together[1] == together[2]


def test_no_shuffle_keeps_the_order_and_gives_ranks_contiguous_parts(prepared):
    prepared.run("data = Numbers(32)", show=False)
    prepared.train(CELL, data="data", no_shuffle=True, micro_batch_size=4, show=False)
    assert samples_by_epoch(prepared)[0] == [
        [0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27],
        [4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31],
    ]


def test_a_loaders_own_batch_size_and_collate_are_kept(prepared):
    prepared.run(
        "def double(samples):\n    return torch.stack(samples) * 2\n"
        "data = DataLoader(Numbers(12), batch_size=3, collate_fn=double)",
        show=False,
    )
    run = prepared.train(CELL, data="data", show=False)
    assert run.micro_batch_size == 3
    assert samples_by_epoch(prepared)[0] == [[0, 2, 4, 12, 14, 16], [6, 8, 10, 18, 20, 22]]


def test_a_collate_function_may_be_named(prepared):
    prepared.run(
        "data = Numbers(16)\ndef half(samples):\n    return torch.stack(samples) / 2", show=False
    )
    prepared.train(
        CELL, data="data", collate="half", no_shuffle=True, micro_batch_size=8, show=False
    )
    assert samples_by_epoch(prepared)[0][0] == [0, 0, 1, 1, 2, 2, 3, 3]


def test_an_incomplete_last_batch_is_dropped_and_said(prepared):
    prepared.run("data = Numbers(37)", show=False)
    run = prepared.train(CELL, data="data", micro_batch_size=8, show=False)
    assert run.steps == 2
    assert any("last 5 of 37 samples" in note for note in run.notes)


def test_steps_beyond_an_epoch_go_round(prepared):
    prepared.run("data = Numbers(32)", show=False)
    run = prepared.train(CELL, data="data", steps=5, micro_batch_size=8, show=False)
    assert run.steps == 5
    assert sorted(samples_by_epoch(prepared)) == [0, 1, 2]


def test_too_few_samples_for_a_step_is_one_clear_line(prepared):
    prepared.run("data = Numbers(5)", show=False)
    with pytest.raises(CellFailedError, match=r"has 5 samples and one step takes 8 × 1 × 2 ranks"):
        prepared.train(CELL, data="data", show=False)


def test_a_loader_over_an_iterable_gives_ranks_different_batches(prepared):
    prepared.run(
        "class Stream(IterableDataset):\n"
        "    def __iter__(self):\n"
        "        return iter(torch.arange(20.0, dtype=torch.float64).unsqueeze(1))\n"
        "data = DataLoader(Stream(), batch_size=2)",
        show=False,
    )
    run = prepared.train(CELL, data="data", show=False)
    assert run.steps == 5
    assert samples_by_epoch(prepared)[0] == [
        [0, 1, 4, 5, 8, 9, 12, 13, 16, 17],
        [2, 3, 6, 7, 10, 11, 14, 15, 18, 19],
    ]


@pytest.mark.parametrize("lengths", [(3, 5), (5, 3), (4, 4)])
def test_ranks_with_unequal_data_take_the_same_number_of_steps(prepared, lengths):
    prepared.run(
        f"def batches():\n    for i in range({lengths}[rank_]):\n"
        "        yield torch.full((2, 1), float(i), dtype=torch.float64)\n"
        "rank_ = rank\ndata = batches()",
        show=False,
    )
    run = prepared.train(CELL, data="data", show=False)
    assert run.steps == min(lengths)
    assert run.state == "done"


def test_batches_of_unequal_size_count_by_their_samples(prepared):
    """The gradient is that of the mean over all samples, however ranks cut them."""
    prepared.run(
        "values = torch.arange(1.0, 9.0, dtype=torch.float64).unsqueeze(1)\n"
        "data = iter([values[:3] if rank == 0 else values[3:]])",
        show=False,
    )
    run = prepared.train(CELL, data="data", show=False)
    expected = (
        prepared.pull("float(model.weight.full_tensor())"),
        prepared.pull("float(model.bias.full_tensor())"),
    )
    import torch

    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1).double()
    x = torch.arange(1.0, 9.0, dtype=torch.float64).unsqueeze(1)
    loss = model(x).pow(2).mean()
    loss.backward()
    assert run.losses == pytest.approx([loss.item()], rel=1e-12)
    assert expected[0] == pytest.approx((model.weight - 0.01 * model.weight.grad).item(), rel=1e-12)
    assert expected[1] == pytest.approx((model.bias - 0.01 * model.bias.grad).item(), rel=1e-12)


@pytest.mark.parametrize(
    ("data", "options", "words"),
    [
        ("missing", {}, "--data missing is not there"),
        ("seven", {}, "is a int"),
        ("stream", {"micro_batch_size": 4}, "--micro-batch-size 4 cannot change batches"),
        ("stream", {"no_shuffle": True}, "--no-shuffle is for samples"),
        ("stream", {"collate": "len"}, "--collate is for samples"),
        ("stream", {"epochs": 2}, "pass the function that makes it"),
    ],
)
def test_data_that_cannot_work_is_one_clear_line(prepared, data, options, words):
    prepared.run("seven = 7\nstream = (torch.ones(2, 1) for _ in range(3))", show=False)
    with pytest.raises(CellFailedError, match=words):
        prepared.train(CELL, data=data, show=False, **options)


def test_an_error_in_the_data_set_is_shown_with_the_persons_frames(prepared):
    prepared.run(
        "class Broken(Numbers):\n    def __getitem__(self, index):\n"
        "        if index == 3:\n            raise OSError('unreadable')\n"
        "        return super().__getitem__(index)\ndata = Broken(16)",
        show=False,
    )
    with pytest.raises(CellFailedError, match="unreadable") as caught:
        prepared.train(CELL, data="data", show=False)
    assert "__getitem__" in str(caught.value)
    assert "site-packages" not in str(caught.value)


def test_training_cells_draw_differently_on_ranks_and_plain_cells_alike(prepared):
    prepared.run("data = Numbers(16)\ndrawn = []", show=False)
    prepared.train(
        "drawn.append(float(torch.rand(())))\n" + CELL, data="data", micro_batch_size=8, show=False
    )
    assert prepared.pull("drawn", rank=0) != prepared.pull("drawn", rank=1)
    plain = prepared.run("float(torch.rand(()))", show=False)
    assert plain[0].result == plain[1].result


def test_map_style_data_of_unequal_length_gives_ranks_the_same_number_of_steps(prepared):
    prepared.run("data = Numbers(64 if rank == 0 else 32)", show=False)
    run = prepared.train(CELL, data="data", micro_batch_size=4, show=False)
    assert (run.state, run.steps) == ("done", 4)


def test_a_step_counts_every_batch_as_one_if_any_rank_cannot_count_its_samples(prepared):
    prepared.run(
        "data = iter([(torch.ones(4, 1, dtype=torch.float64), torch.ones(4 if rank else 7))])",
        show=False,
    )
    run = prepared.train(
        "loss = (model(batch[0]) * 0).sum() + float(rank)", data="data", show=False
    )
    assert run.losses == [0.5]
    assert any("each counts one" in note for note in run.notes)


READY = """
class Ready:
    def __iter__(self):
        return iter([torch.full((2, 1), float(i), dtype=torch.float64) for i in range(3)])
"""


def test_ready_batches_begin_anew_at_each_run(prepared):
    prepared.run(READY + "data = Ready()", show=False)
    assert [prepared.train(CELL, data="data", show=False).steps for _ in range(3)] == [3, 3, 3]
    assert prepared.train(CELL, data="data", steps=7, show=False).steps == 7


def test_the_ready_batch_of_a_failed_step_comes_again(prepared):
    prepared.run(
        "data = (torch.full((2, 1), float(i), dtype=torch.float64) for i in range(9))", show=False
    )
    with pytest.raises(CellFailedError):
        prepared.train("if step == 2: 1 / 0\n" + CELL, data="data", steps=5, show=False)
    prepared.train(CELL, data="data", steps=2, show=False)
    taken = [batch[0] for _, batch in prepared.pull("seen")]
    assert taken == [0, 1, 2, 3]


def test_data_that_ends_early_is_said(prepared):
    prepared.run("data = (torch.ones(2, 1, dtype=torch.float64) for _ in range(3))", show=False)
    run = prepared.train(CELL, data="data", steps=5, show=False)
    assert run.steps == 3
    assert "the data ended after 3 of 5 steps" in run.notes


def test_a_sampler_of_fewer_samples_still_reaches_all(prepared):
    prepared.run(
        "numbers = Numbers(64)\n"
        "data = DataLoader(numbers, batch_size=4, "
        "sampler=torch.utils.data.RandomSampler(numbers, num_samples=16))",
        show=False,
    )
    prepared.train(CELL, data="data", steps=20, show=False)
    epochs = samples_by_epoch(prepared)
    assert all(len(set(ranks[0] + ranks[1])) == 16 for ranks in epochs.values())
    assert max(max(ranks[0]) for ranks in epochs.values()) > 32


def test_a_distributed_sampler_is_refused_in_one_line(prepared):
    prepared.run(
        "from torch.utils.data.distributed import DistributedSampler\n"
        "numbers = Numbers(64)\n"
        "data = DataLoader(numbers, batch_size=4, sampler=DistributedSampler(numbers))",
        show=False,
    )
    with pytest.raises(CellFailedError, match="leave the sampler out"):
        prepared.train(CELL, data="data", show=False)
