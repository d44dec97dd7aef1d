"""Which samples each rank takes: the real code, every rank in turn in this process."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, WeightedRandomSampler

from fsdp_magic.core.errors import FsdpError
from fsdp_magic.engine.agreement import Alone
from fsdp_magic.engine.cut import Cut
from fsdp_magic.engine.data import Data
from fsdp_magic.engine.eval_batches import EvalBatches
from fsdp_magic.engine.position import Position

CPU = torch.device("cpu")
SIZES = st.integers(1, 5)
QUICK = settings(max_examples=30, deadline=None)


def as_list(samples):
    """Leave samples as they are: a batch is the list of them."""
    return list(samples)


def open_rank(source, rank, ranks, *, position=None, epochs=1, steps=False, **cut) -> Data:
    cut.setdefault("collate", as_list)
    cut.setdefault("seed", 0)
    return Data(
        source if isinstance(source, tuple) else (source,),
        cut=Cut(rank=rank, ranks=ranks, **cut),
        goes_round=steps,
        epochs=None if steps else epochs,
        device=CPU,
        position=Position() if position is None else position,
        agreement=Alone(),
    )


def take(data: Data, steps: int | None = None) -> list[Any]:
    """Return each step's epoch and micro-batches; of all that are left where none is said."""
    taken = []
    while steps is None or len(taken) < steps:
        step = data.take()
        if step is None:
            break
        taken.append((step.epoch, step.batches))
        data.commit()
    return taken


def of_ranks(source, ranks, steps=None, **options) -> list[list[Any]]:
    """Return what each rank takes of one epoch."""
    found = []
    for rank in range(ranks):
        data = open_rank(source() if callable(source) else source, rank, ranks, **options)
        found.append(take(data, data.steps_per_epoch if steps is None else steps))
    return found


def flat(batches) -> list[Any]:
    return list(itertools.chain.from_iterable(batches))


def by_step(ranks) -> list[list[Any]]:
    """Return the samples of each global batch, in order of ranks and micro-batches."""
    return [flat(flat(batches) for _, batches in together) for together in zip(*ranks, strict=True)]


class Stream(IterableDataset):
    """Samples one by one, in an order that is drawn."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self):
        numbers = list(range(self.length))
        random.shuffle(numbers)
        yield from numbers


class Sampler:
    """A batch sampler of a person's own, which draws."""

    def __init__(self, length: int, size: int) -> None:
        self.length, self.size = length, size

    def __iter__(self):
        order = torch.randperm(self.length).tolist()
        return iter([order[i : i + self.size] for i in range(0, self.length, self.size)])

    def __len__(self):
        return -(-self.length // self.size)


KINDS = {
    "list": lambda n, size: list(range(n)),
    "loader": lambda n, size: DataLoader(range(n), batch_size=size, shuffle=True),
    "sampler": lambda n, size: DataLoader(
        range(n), batch_size=size, sampler=RandomSampler(range(n), num_samples=n)
    ),
    "stream": lambda n, size: Stream(n),
    "stream loader": lambda n, size: DataLoader(Stream(n), batch_size=3),
}


@pytest.mark.parametrize("kind", KINDS)
@QUICK
@given(
    steps=st.integers(1, 4),
    rest=st.integers(0, 200),
    ranks=SIZES,
    micro=SIZES,
    accumulate=SIZES,
    seed=st.integers(0, 2**40),
)
def test_ranks_take_disjoint_samples_and_all_but_the_dropped_rest(
    kind, steps, rest, ranks, micro, accumulate, seed
):
    size = ranks * micro * accumulate
    length = steps * size + rest % size
    found = of_ranks(
        lambda: KINDS[kind](length, micro),
        ranks,
        steps=steps,
        micro_batch_size=micro,
        accumulate=accumulate,
        seed=seed,
    )
    assert {len(rank) for rank in found} == {steps}
    assert all(len(batch) == micro for rank in found for _, step in rank for batch in step)
    taken = flat(by_step(found))
    assert len(taken) == len(set(taken)) == steps * size
    assert set(taken) <= set(range(length))


@pytest.mark.parametrize("kind", KINDS)
@QUICK
@given(data=st.data(), size=st.sampled_from([4, 6, 12]), seed=st.integers(0, 99))
def test_a_step_holds_the_same_samples_however_the_global_batch_is_cut(kind, data, size, seed):
    """Even in the same order, once ranks and micro-batches are put one after the other."""
    ranks = data.draw(st.sampled_from([n for n in (1, 2, 3, 4) if size % n == 0]))
    micro = data.draw(st.sampled_from([n for n in range(1, 13) if size // ranks % n == 0]))

    def cut(ranks, micro, accumulate):
        options = {"micro_batch_size": micro, "accumulate": accumulate, "seed": seed}
        return by_step(of_ranks(lambda: KINDS[kind](30, micro), ranks, steps=2, **options))

    assert cut(ranks, micro, size // ranks // micro) == cut(1, size, 1)


@pytest.mark.parametrize("kind", [*KINDS, "tokens", "batch sampler", "ready"])
@QUICK
@given(first=st.integers(0, 11), seed=st.integers(0, 99), ranks=st.integers(1, 3))
def test_a_position_resumes_where_it_was(kind, first, seed, ranks):
    options: dict[str, Any] = {"micro_batch_size": 2, "seed": seed}
    if kind == "tokens":
        source, options = list(TEXTS), {"tokens_per_batch": 12, "seed": seed}
    elif kind == "batch sampler":
        source = DataLoader(range(40), batch_sampler=Sampler(40, 3), collate_fn=as_list)
        options = {"seed": seed, "collate": None}
    elif kind == "ready":
        source, options = Again(), {"collate": None}
    else:
        source = KINDS[kind](40, 2)
    for rank in range(ranks):
        at_once = take(open_rank(source, rank, ranks, steps=True, **options), 12)
        position = Position()
        begun = take(
            open_rank(source, rank, ranks, steps=True, position=position, **options), first
        )
        again = open_rank(source, rank, ranks, steps=True, position=position, **options)
        assert begun + take(again, 12 - first) == at_once


@pytest.mark.parametrize("kind", KINDS)
def test_the_order_differs_by_epoch_and_by_seed(kind):
    source = KINDS[kind](64, 4)
    epochs = {}
    for seed in (0, 1):
        taken = take(open_rank(source, 0, 1, steps=True, micro_batch_size=4, seed=seed), 48)
        for epoch in range(3):
            samples = [flat(batches) for of, batches in taken if of == epoch]
            epochs[seed, epoch] = flat(samples)
            assert sorted(epochs[seed, epoch]) == list(range(64))
    assert len({tuple(order) for order in epochs.values()}) == 6


def test_no_shuffle_is_the_datas_own_order_in_every_epoch():
    taken = take(open_rank(list(range(8)), 0, 1, epochs=2, micro_batch_size=4, shuffle=False), 4)
    assert [flat(batches) for _, batches in taken] == [[0, 1, 2, 3], [4, 5, 6, 7]] * 2


def test_a_position_in_another_cut_goes_on_with_the_samples_that_are_left():
    data, position = list(range(24)), Position()
    first = take(open_rank(data, 0, 1, steps=True, micro_batch_size=5, position=position), 2)
    rest = take(open_rank(data, 0, 1, steps=True, micro_batch_size=7, position=position), 2)
    assert [epoch for epoch, _ in first + rest] == [0] * 4
    assert sorted(flat(flat(batches) for _, batches in first + rest)) == data


class LazySampler(Sampler):
    """One that draws as it goes."""

    def __iter__(self):
        yield from super().__iter__()


@pytest.mark.parametrize("sampler", [Sampler, LazySampler])
@QUICK
@given(rounds=st.integers(1, 4), ranks=SIZES, accumulate=st.integers(1, 3), rest=st.integers(0, 9))
def test_ranks_share_the_batches_of_a_loaders_own_sampler(sampler, rounds, ranks, accumulate, rest):
    together = ranks * accumulate
    length = 2 * (rounds * together + rest % together)
    loader = DataLoader(range(length), batch_sampler=sampler(length, 2), collate_fn=as_list)
    options = {"collate": None, "accumulate": accumulate}
    found = of_ranks(loader, ranks, **options)
    assert {len(rank) for rank in found} == {rounds}
    samples = flat(by_step(found))
    assert len(set(samples)) == len(samples) == 2 * rounds * together
    if rest == 0:
        alone = of_ranks(loader, 1, collate=None, accumulate=together)
        assert [set(step) for step in by_step(found)] == [set(step) for step in by_step(alone)]


# -- batches of like length

TEXTS = [[i] * random.Random(i).randint(1, 6) for i in range(60)]


@QUICK
@given(
    lengths=st.lists(st.integers(1, 9), min_size=30, max_size=80),
    tokens=st.integers(9, 40),
    ranks=st.integers(1, 3),
    accumulate=st.integers(1, 3),
    shuffle=st.booleans(),
    seed=st.integers(0, 99),
)
def test_batches_of_tokens_hold_no_more_and_every_sample_at_most_once(
    lengths, tokens, ranks, accumulate, shuffle, seed
):
    texts = [{"input_ids": [0] * n, "number": i} for i, n in enumerate(lengths)]
    options = {"tokens_per_batch": tokens, "accumulate": accumulate, "shuffle": shuffle}
    try:
        found = [take(open_rank(texts, r, ranks, seed=seed, **options)) for r in range(ranks)]
    except FsdpError:  # too few for one step
        assume(False)
    assert len({len(rank) for rank in found}) == 1
    batches = [batch for rank in found for _, step in rank for batch in step]
    assert all(len(step) == accumulate for rank in found for _, step in rank)
    for batch in batches:
        assert max(len(text["input_ids"]) for text in batch) * len(batch) <= tokens
    numbers = [text["number"] for text in flat(batches)]
    assert len(numbers) == len(set(numbers))
    again = [take(open_rank(texts, r, ranks, seed=seed, **options)) for r in range(ranks)]
    assert again == found


def test_batches_of_tokens_waste_little_and_drop_little():
    lengths = [random.Random(i).randint(1, 100) for i in range(2000)]
    texts = [[0] * n for n in lengths]
    taken = take(open_rank(texts, 0, 1, tokens_per_batch=1000))
    batches = flat(step for _, step in taken)
    assert len(flat(batches)) == 2000
    padded = sum(max(map(len, batch)) * len(batch) for batch in batches)
    assert sum(lengths) / padded > 0.9
    assert len({max(map(len, batch)) for batch in batches[:5]}) > 1  # not in order of length


def test_batches_of_tokens_differ_by_epoch():
    first, second = (
        [
            batches
            for epoch, batches in take(open_rank(TEXTS, 0, 1, epochs=2, tokens_per_batch=12))
            if epoch == number
        ]
        for number in (0, 1)
    )
    assert first != second
    assert sorted(flat(flat(first))) == sorted(flat(flat(second))) == sorted(TEXTS)


# -- several sources, functions, ready batches


class Again:
    """Ready batches that can be read again."""

    def __init__(self, length: int = 5) -> None:
        self.length = length

    def __iter__(self):
        return iter([[i] for i in range(self.length)])


def test_the_shortest_of_several_sources_ends_an_epoch():
    sources = (list(range(32)), Again(2))
    taken = take(open_rank(sources, 0, 1, epochs=2, collate=None, accumulate=1))
    assert [epoch for epoch, _ in taken] == [0, 0, 1, 1]


def test_with_steps_each_source_goes_round_by_itself():
    sources = (Again(2), Again(3))
    taken = take(open_rank(sources, 0, 1, steps=True, collate=None), 5)
    pairs = [(a[0], b[0]) for _, [(a, b)] in taken]
    assert pairs == [(0, 0), (1, 1), (0, 2), (1, 0), (0, 1)]


def test_sources_keep_a_position_each():
    position, one, other = Position(), Again(5), Again(5)
    take(open_rank(one, 0, 1, steps=True, collate=None, position=position), 2)
    take(open_rank(other, 0, 1, steps=True, collate=None, position=position), 4)
    both = open_rank((one, other), 0, 1, steps=True, collate=None, position=position)
    assert take(both, 1)[0][1] == [([2], [4])]


def test_a_function_is_called_once_per_epoch_with_it():
    calls = []

    def made(epoch):
        calls.append(epoch)
        return ([[epoch, i]] for i in range(epoch + 2))

    position = Position()
    options = {"collate": None, "position": position}
    taken = take(open_rank(made, 0, 1, epochs=2, **options))
    assert [(epoch, batch[0][0]) for epoch, batch in taken] == [
        (0, [0, 0]),
        (0, [0, 1]),
        (1, [1, 0]),
        (1, [1, 1]),
        (1, [1, 2]),
    ]
    assert calls == [0, 1, 2]  # the third has begun, and is read by the next run
    assert len(take(open_rank(made, 0, 1, **options))) == 4
    assert calls == [0, 1, 2, 3]


def test_a_function_may_return_samples_that_are_cut_over_ranks():
    def made():
        return [random.random() for _ in range(8)]

    found = [take(open_rank(made, rank, 2, micro_batch_size=2)) for rank in range(2)]
    assert {len(rank) for rank in found} == {2}
    assert by_step(found) == by_step([take(open_rank(made, 0, 1, micro_batch_size=4))])


def test_an_error_in_a_stream_does_not_end_its_epoch():
    class Fragile(Again):
        broken = True

        def __iter__(self):
            for i in range(5):
                if i == 3 and self.broken:
                    self.broken = False
                    raise OSError("gone")
                yield [i]

    source, position = Fragile(), Position()
    with pytest.raises(OSError, match="gone"):
        take(open_rank(source, 0, 1, collate=None, position=position))
    taken = take(open_rank(source, 0, 1, collate=None, position=position))
    assert [batches[0][0] for _, batches in taken] == [3, 4]


class Maker:
    def batches(self):
        return ([i] for i in range(6))


def test_a_method_keeps_its_position_though_it_is_made_anew_each_time():
    maker, position = Maker(), Position()
    options = {"collate": None, "position": position, "steps": True}
    first = take(open_rank(maker.batches, 0, 1, **options), 2)
    rest = take(open_rank(maker.batches, 0, 1, **options), 2)
    assert [batches[0][0] for _, batches in first + rest] == [0, 1, 2, 3]


def test_the_last_step_of_an_epoch_is_known_where_lengths_are():
    data = open_rank(list(range(8)), 0, 1, steps=True, micro_batch_size=4)
    stream = open_rank(Stream(8), 0, 1, steps=True, micro_batch_size=4)
    ends: dict[Any, list[Any]] = {data: [], stream: []}
    for each, said in ends.items():
        for _ in range(4):
            said.append(each.take().ends_epoch)
            each.commit()
    assert list(ends.values()) == [[False, True, False, True], [None] * 4]


def test_labels_are_counted_before_a_batch_leaves_for_the_device():
    counted = []

    def count_labels(batch):
        counted.append(batch.device.type)
        return int((batch != -100).sum())

    data = Data(
        [[torch.tensor([1, -100, 3])] * 4],
        cut=Cut(rank=0, ranks=1, seed=0, micro_batch_size=2, accumulate=2),
        goes_round=True,
        epochs=None,
        device=torch.device("meta"),
        position=Position(),
        agreement=Alone(),
        count_labels=count_labels,
    )
    step = data.take()
    assert (step.labels, step.counts, counted) == ([4, 4], [2, 2], ["cpu", "cpu"])
    assert {batch.device.type for batch in step.batches} == {"meta"}


def test_rows_that_a_weighted_sampler_draws_twice_count_twice():
    sampler = WeightedRandomSampler([1.0] * 8, 16, replacement=True)
    loader = DataLoader(range(8), batch_size=4, sampler=sampler)
    (taken,) = of_ranks(loader, 1, micro_batch_size=4)
    assert len(flat(flat(batches) for _, batches in taken)) == 16


def test_lengths_of_samples_are_read_once_a_run():
    class Counted(list):
        reads = 0

        def __getitem__(self, index):
            Counted.reads += 1
            return super().__getitem__(index)

    take(open_rank(Counted(TEXTS), 0, 1, epochs=3, tokens_per_batch=12))
    assert Counted.reads <= 4 * len(TEXTS)


# -- marks


def numbers():
    return ([i] for i in range(12))


@pytest.mark.parametrize("before", [0, 3])
@pytest.mark.parametrize("source", [numbers, numbers(), Again(12), list(range(24)), Stream(24)])
def test_a_mark_is_gone_back_to_exactly_also_in_what_cannot_be_rewound(source, before):
    position = Position()
    ready = not isinstance(source, (list, Stream))
    options = {"position": position, "collate": None if ready else as_list}
    if not ready:
        options["micro_batch_size"] = 2
    if source is not numbers and ready:
        source = source if isinstance(source, Again) else numbers()
    take(open_rank(source, 0, 1, steps=True, **options), before)
    mark = position.mark()
    tried = take(open_rank(source, 0, 1, steps=True, **options), 4)
    position.back(mark)
    once = take(open_rank(source, 0, 1, steps=True, **options), 2)
    position.back(mark)
    all_of_it = take(open_rank(source, 0, 1, steps=True, **options), 9)
    assert tried == all_of_it[:4]
    assert once == all_of_it[:2]
    assert len(all_of_it) == 9


def test_batches_that_nobody_can_go_back_to_are_freed():
    import weakref

    class Batch:
        pass

    alive: list[Any] = []

    def batch():
        made = Batch()
        alive.append(weakref.ref(made))
        return made

    data = open_rank((batch() for _ in range(4)), 0, 1, collate=None)
    for _ in range(3):
        assert data.take() is not None
        data.commit()
    assert [reference() is None for reference in alive] == [True, True, True]


# -- evaluation


class Scripted(Alone):
    """Says for a number of times that a rank still has something."""

    def __init__(self, passes: int) -> None:
        self.left = passes

    def any_has(self, has: bool) -> bool:
        self.left -= 1
        assert not (has and self.left < 0), "more passes than other ranks make"
        return self.left >= 0


class Plain(IterableDataset):
    """Samples one by one, in their own order."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self):
        return iter(range(self.length))


@pytest.mark.parametrize("kind", ["list", "loader", "stream", "ready"])
@QUICK
@given(length=st.integers(1, 40), ranks=SIZES, micro=SIZES)
def test_evaluation_takes_every_sample_once_and_tells_its_place(kind, length, ranks, micro):
    source = (
        DataLoader(
            range(length),
            batch_sampler=[list(range(length))[i : i + micro] for i in range(0, length, micro)],
            collate_fn=as_list,
        )
        if kind == "ready"
        else {**KINDS, "stream": lambda n, size: Plain(n)}[kind](length, micro)
    )
    options = {} if kind == "ready" else {"micro_batch_size": micro, "collate": as_list}
    passes = -(-length // (ranks * micro))
    found = []
    for rank in range(ranks):
        batches = EvalBatches(
            source, rank=rank, world_size=ranks, device=CPU, agreement=Scripted(passes), **options
        )
        of_rank = list(batches)
        assert len(of_rank) == passes
        assert batches.passes in (passes, None)
        found += [(each.start, each.batch) for each in of_rank if each.count != 0]
        assert all(each.batch for each in of_rank)
    assert len({start for start, _ in found}) == len(found)
    ordered = flat(batch for _, batch in sorted(found, key=lambda pair: pair[0]))
    assert ordered == list(range(length))
