"""Blocks of device memory as CUDA's caching allocator keeps them, and its sizes; pure.

Source: ``c10/cuda/CUDACachingAllocator.cpp`` and ``c10/core/AllocatorConfig.h`` of torch 2.13.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple

from fsdp_magic.core.planning.ledger import Stream
from fsdp_magic.core.units import MIB

SMALLEST_BLOCK = 512
"""Sizes are rounded up to multiples of it. Source: ``kMinBlockSize``, ``round_size``."""
LARGEST_SMALL = 1 * MIB
"""Sizes up to it are in a pool of their own. Source: ``kSmallSize``, ``get_pool``."""
SMALL_SEGMENT = 2 * MIB
"""What the small pool takes from the device, and a page of it. Source: ``kSmallBuffer``."""
LARGE_SEGMENT = 20 * MIB
"""What the large pool takes for middling sizes, and a page of it. Source:
``large_segment_size_`` in ``AllocatorConfig.h``."""
MIDDLING = 10 * MIB
"""From here on a segment is as large as what it is taken for. Source: ``kMinLargeAlloc``."""
LARGE_ROUNDING = 2 * MIB
"""Such segments are multiples of it. Source: ``kRoundLarge``, ``get_allocation_size``."""


class Pool(NamedTuple):
    """Free blocks are shared within a pool only. Source: ``BlockComparatorSize``, ``get_pool``."""

    stream: Stream
    is_small: bool

    @property
    def page(self) -> int:
        """Bytes that an expandable segment grows by. Source: ``find_expandable_block``."""
        return SMALL_SEGMENT if self.is_small else LARGE_SEGMENT


class Block:
    """A range of addresses: in use, free, or (of an expandable segment) not mapped."""

    __slots__ = ("address", "is_free", "is_mapped", "next", "pool", "previous", "size")

    def __init__(self, pool: Pool, address: int, size: int, *, is_mapped: bool = True) -> None:
        self.pool = pool
        self.address = address
        self.size = size
        self.is_mapped = is_mapped
        self.is_free = not is_mapped
        self.previous: Block | None = None
        self.next: Block | None = None

    def __lt__(self, other: Block) -> bool:
        """Order by size, then by address. Source: ``BlockComparatorSize``."""
        return (self.size, self.address) < (other.size, other.address)


def rounded(size: float) -> int:
    """Return the bytes that a request takes. Source: ``round_size``."""
    return max(SMALLEST_BLOCK, -(-int(size) // SMALLEST_BLOCK) * SMALLEST_BLOCK)


def segment_size(size: int) -> int:
    """Return the bytes of a segment that is taken for a size. Source: ``get_allocation_size``."""
    if size <= LARGEST_SMALL:
        return SMALL_SEGMENT
    if size < MIDDLING:
        return LARGE_SEGMENT
    return -(-size // LARGE_ROUNDING) * LARGE_ROUNDING


def size_of(block: Block) -> int:
    """Return the bytes of a block."""
    return block.size


def room(block: Block) -> int:
    """Return the bytes that a free block has or can grow to."""
    following = block.next
    return block.size + (following.size if following and not following.is_mapped else 0)


def remove(blocks: list[Block], block: Block) -> None:
    """Take a block out of a sorted list."""
    found = blocks.pop(bisect_left(blocks, block))
    assert found is block


def splice(block: Block, *, after: Block) -> None:
    """Put a block behind another one of its segment."""
    block.previous, block.next = after, after.next
    if after.next is not None:
        after.next.previous = block
    after.next = block


def unlink(block: Block) -> None:
    """Take a block out of its segment."""
    if block.previous is not None:
        block.previous.next = block.next
    if block.next is not None:
        block.next.previous = block.previous
