"""micro × accumulation × data-parallel = global."""

import itertools

import pytest

from fsdp_magic.core.batch import GlobalBatch

SHAPES = list(itertools.product((1, 3, 8), (1, 2, 5), (1, 2, 4)))


def batch(micro: int, accumulate: int, ranks: int) -> GlobalBatch:
    return GlobalBatch(micro_batch_size=micro, accumulate=accumulate, data_parallel_size=ranks)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_global_batch_is_the_product(shape: tuple[int, int, int]) -> None:
    micro, accumulate, ranks = shape
    assert batch(*shape).global_size == micro * accumulate * ranks


@pytest.mark.parametrize("shape", SHAPES)
def test_micro_batches_cover_every_sample_once_and_in_order(shape: tuple[int, int, int]) -> None:
    whole = batch(*shape)
    taken = [
        sample
        for rank in range(whole.data_parallel_size)
        for start, end in whole.micro_batch_slices(rank)
        for sample in range(start, end)
    ]
    assert taken == list(range(whole.global_size))


@pytest.mark.parametrize("shape", SHAPES)
def test_every_micro_batch_has_the_same_size(shape: tuple[int, int, int]) -> None:
    whole = batch(*shape)
    for rank in range(whole.data_parallel_size):
        slices = whole.micro_batch_slices(rank)
        assert len(slices) == whole.accumulate
        assert {end - start for start, end in slices} == {whole.micro_batch_size}


def test_the_cut_is_shown_as_a_sum() -> None:
    assert batch(8, 4, 2).text() == "8 × 4 × 2 ranks = 64 samples"
    assert batch(8, 4, 1).text() == "8 × 4 × 1 rank = 32 samples"
