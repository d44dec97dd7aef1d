"""The model of CUDA's caching allocator: each rule by a sequence worked out by hand."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_magic.core.planning.allocator import (
    CachingAllocator,
    largest_that_fits,
    reserved_peak,
)
from fsdp_magic.core.planning.allocator_blocks import Block, rounded, segment_size
from fsdp_magic.core.planning.ledger import Ledger
from fsdp_magic.core.planning.step_trace import Size
from fsdp_magic.core.units import KIB, MIB

PLENTY = 1 << 40


def taken(allocator: CachingAllocator, size: float, stream: int = 0) -> Block:
    """Return a block that must be there."""
    block = allocator.allocate(size, stream)
    assert block is not None
    return block


def test_sizes_are_rounded_to_512_bytes() -> None:
    """One byte takes a block, and so does one byte more than a block."""
    assert [rounded(n) for n in (1, 512, 513, 1024.0)] == [512, 512, 1024, 1024]


def test_a_segment_is_as_large_as_its_pool_says() -> None:
    """Small, middling and large sizes, at their borders."""
    sizes = (512, MIB, MIB + 512, 10 * MIB - 512, 10 * MIB, 11 * MIB + 512)
    assert [segment_size(n) // MIB for n in sizes] == [2, 2, 20, 20, 10, 12]


def test_small_blocks_share_a_segment() -> None:
    """Four of half a MiB are in one segment; the fifth needs a second one."""
    allocator = CachingAllocator(PLENTY, expandable=False)
    for _ in range(4):
        taken(allocator, 512 * KIB)
    assert allocator.reserved_bytes == 2 * MIB
    taken(allocator, 1)
    assert allocator.reserved_bytes == 4 * MIB


def test_a_large_block_is_split_only_if_more_than_a_mib_is_left() -> None:
    """Of a free block of 12 MiB, 11 take all; 10 leave 2, which another 2 can take."""
    allocator = CachingAllocator(PLENTY, expandable=False)
    allocator.free(taken(allocator, 12 * MIB))
    whole = taken(allocator, 11 * MIB)
    assert whole.size == 12 * MIB
    allocator.free(whole)
    assert taken(allocator, 10 * MIB).size == 10 * MIB
    assert taken(allocator, 2 * MIB).size == 2 * MIB
    assert allocator.reserved_bytes == 12 * MIB


def test_an_expandable_block_is_split_to_the_last_512_bytes() -> None:
    """Of a page of 20 MiB, 19.5 leave what another half MiB and more cannot take: it grows."""
    allocator = CachingAllocator(PLENTY)
    assert taken(allocator, 19.5 * MIB).size == 19.5 * MIB
    assert allocator.reserved_bytes == 20 * MIB
    assert taken(allocator, 1.5 * MIB).address == 19.5 * MIB
    assert allocator.reserved_bytes == 40 * MIB


def test_the_smallest_free_block_that_fits_is_taken() -> None:
    """Of free blocks of 30, 12 and 20 MiB, 11 go into the 12."""
    allocator = CachingAllocator(PLENTY, expandable=False)
    blocks = [taken(allocator, n * MIB) for n in (30, 12, 20)]
    address = blocks[1].address
    for block in blocks:
        allocator.free(block)
    assert taken(allocator, 11 * MIB).address == address


def test_free_neighbours_become_one() -> None:
    """Three quarters of a segment, freed out of order, can be taken as one."""
    allocator = CachingAllocator(PLENTY, expandable=False)
    blocks = [taken(allocator, 5 * MIB) for _ in range(4)]
    for number in (0, 2, 1):
        allocator.free(blocks[number])
    assert taken(allocator, 9.5 * MIB).address == blocks[0].address
    assert allocator.reserved_bytes == 20 * MIB


def test_streams_share_nothing() -> None:
    """What one stream has freed another cannot use."""
    for expandable in (True, False):
        allocator = CachingAllocator(PLENTY, expandable=expandable)
        allocator.free(taken(allocator, 20 * MIB, stream=1))
        taken(allocator, 20 * MIB, stream=2)
        assert allocator.reserved_bytes == 40 * MIB


def test_cached_segments_are_given_back_before_memory_runs_out() -> None:
    """A free segment of another stream makes room; a split one does not."""
    allocator = CachingAllocator(40 * MIB, expandable=False)
    allocator.free(taken(allocator, 20 * MIB, stream=1))
    taken(allocator, 40 * MIB)
    assert (allocator.reserved_bytes, allocator.peak_reserved_bytes) == (40 * MIB, 40 * MIB)

    allocator = CachingAllocator(40 * MIB, expandable=False)
    taken(allocator, 2 * MIB, stream=1)
    assert allocator.allocate(30 * MIB) is None


def test_an_expandable_segment_grows_at_its_end() -> None:
    """18 MiB are free at the end of the first page: 30 need one page more, not two."""
    allocator = CachingAllocator(PLENTY)
    taken(allocator, 2 * MIB)
    block = taken(allocator, 30 * MIB)
    assert block.address == 2 * MIB
    assert allocator.reserved_bytes == 40 * MIB


def test_what_cannot_grow_is_used_before_the_end_of_a_segment() -> None:
    """A gap of 25 MiB takes 10 MiB, though 15 are free at the end."""
    allocator = CachingAllocator(PLENTY)
    gap = taken(allocator, 25 * MIB)
    taken(allocator, 20 * MIB)
    allocator.free(gap)
    assert taken(allocator, 10 * MIB).address == gap.address


def test_whole_pages_of_a_gap_are_given_back() -> None:
    """Of a gap from 10 to 50 MiB the page from 20 to 40 goes to another stream."""
    allocator = CachingAllocator(80 * MIB)
    taken(allocator, 10 * MIB)
    gap = taken(allocator, 40 * MIB)
    taken(allocator, 30 * MIB)
    allocator.free(gap)
    taken(allocator, 20 * MIB, stream=1)
    assert allocator.reserved_bytes == 80 * MIB
    assert allocator.allocate(20 * MIB, stream=1) is None
    # The two ends of the gap are still free; that which cannot grow is taken first.
    assert taken(allocator, 10 * MIB).address == 40 * MIB
    assert taken(allocator, 10 * MIB).address == 10 * MIB


def steps(sizes: list[int]) -> Ledger:
    """Return a ledger that takes so many MiB a sample of each, one after the other."""
    ledger = Ledger()
    for number, size in enumerate(sizes):
        ledger.take(("t", number), Size(0.0, size * MIB), "activation", stream=number % 2)
    for number in range(len(sizes)):
        ledger.give_back(("t", number))
    return ledger


def test_the_largest_batch_fits_and_one_more_does_not() -> None:
    """Both modes, whatever is taken for the ideal."""
    ledger = steps([3, 7, 11])
    for expandable in (True, False):
        for ideal in (47, 60, 200):
            most = largest_that_fits(ledger, 1000 * MIB, ideal, expandable=expandable)
            assert 44 <= most <= 47
            assert reserved_peak(ledger, most, 1000 * MIB, expandable=expandable) is not None
            assert reserved_peak(ledger, most + 1, 1000 * MIB, expandable=expandable) is None
    assert largest_that_fits(ledger, 10 * MIB, 47) == 0
    assert largest_that_fits(ledger, PLENTY, 47) == 47


SEQUENCE = st.lists(
    st.tuples(st.integers(0, 30), st.integers(0, 2), st.integers(1, 60 * MIB)), max_size=60
)


@given(SEQUENCE, st.booleans())
@settings(deadline=None, max_examples=60)
def test_blocks_never_overlap_and_free_memory_is_joined(
    sequence: list[tuple[int, int, int]], expandable: bool
) -> None:
    """Any sequence: no overlap, reserved covers allocated, and in the end all can go back."""
    allocator = CachingAllocator(800 * MIB, expandable=expandable)
    live: dict[int, Block] = {}
    for slot, stream, size in sequence:
        if slot in live:
            allocator.free(live.pop(slot))
            continue
        block = allocator.allocate(size, stream)
        if block is not None:
            assert block.size >= size
            live[slot] = block
        ordered = sorted(live.values(), key=lambda each: each.address)
        assert all(a.address + a.size <= b.address for a, b in pairwise(ordered))
        assert allocator.allocated_bytes == sum(each.size for each in ordered)
        assert allocator.allocated_bytes <= allocator.reserved_bytes <= 800 * MIB
    for block in live.values():
        allocator.free(block)
    assert allocator.allocated_bytes == 0
    allocator.release()
    assert allocator.reserved_bytes == 0


def test_a_segment_is_mapped_anew_from_its_lowest_gap_on() -> None:
    """Of two gaps that were given back the first is used again."""
    allocator = CachingAllocator(PLENTY)
    blocks = [taken(allocator, size * MIB) for size in (40, 20, 40, 20)]
    addresses = [block.address for block in blocks]
    for gap in (blocks[2], blocks[0]):
        allocator.free(gap)
    allocator.release()
    assert allocator.reserved_bytes == 40 * MIB
    assert taken(allocator, 20 * MIB).address == addresses[0]


def test_a_ledger_reserves_for_each_stream() -> None:
    """What was given back on one stream is not there for the other."""
    ledger = Ledger()
    for stream in (1, 0):
        ledger.take(("t", stream), 20 * MIB, "activation", stream=stream)
        ledger.give_back(("t", stream))
    assert reserved_peak(ledger, 1, PLENTY) == 40 * MIB


def test_the_peak_is_the_most_that_was_ever_reserved() -> None:
    """A segment of 40 MiB has gone back when one of 2 MiB is taken."""
    allocator = CachingAllocator(40 * MIB, expandable=False)
    allocator.free(taken(allocator, 40 * MIB))
    allocator.release()
    taken(allocator, 1)
    assert (allocator.reserved_bytes, allocator.peak_reserved_bytes) == (2 * MIB, 40 * MIB)
