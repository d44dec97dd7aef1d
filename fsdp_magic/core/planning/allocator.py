"""A model of CUDA's caching allocator in torch: what a ledger reserves of a device; pure.

The allocator takes segments from the device and cuts blocks from them. A freed block is kept, and
joined with free neighbours, for later use on the same stream; memory goes back to the device only
when nothing else helps. So more is reserved than allocated, and a step that needs less than the
device has can still fail: the gaps between blocks are of the wrong size.

Two modes. With ``expandable_segments:True``, which our engines set, a pool of a stream has one
long range of addresses, mapped page by page as it grows, and whole free pages can be unmapped.
Without it a segment is as large as what it was taken for.

Left out: an event that a block used on two streams waits for; garbage collection and
``max_split_size_mb``, which are off unless a person sets them; pools of CUDA graphs.

Source: ``c10/cuda/CUDACachingAllocator.cpp`` and ``c10/core/AllocatorConfig.h`` of torch 2.13;
the functions named below are theirs.
"""

from __future__ import annotations

from bisect import bisect_left, insort

from fsdp_magic.core.planning.allocator_blocks import (
    LARGE_SEGMENT,
    LARGEST_SMALL,
    SMALLEST_BLOCK,
    Block,
    Pool,
    remove,
    room,
    rounded,
    segment_size,
    size_of,
    splice,
    unlink,
)
from fsdp_magic.core.planning.ledger import Key, Ledger, Stream


class CachingAllocator:
    """The allocator of one device.

    Args:
        capacity_bytes: what the device can give it.
        expandable: whether segments are expandable.

    Attributes:
        allocated_bytes: in blocks that are in use.
        reserved_bytes: taken from the device.
        peak_reserved_bytes: the most that was ever taken.
    """

    def __init__(self, capacity_bytes: int, *, expandable: bool = True) -> None:
        self.capacity_bytes = capacity_bytes
        self.expandable = expandable
        self.allocated_bytes = 0
        self.reserved_bytes = 0
        self.peak_reserved_bytes = 0
        self._free: dict[Pool, list[Block]] = {}
        self._unmapped: dict[Pool, list[Block]] = {}
        self._next_address = 0

    def allocate(self, size: float, stream: Stream = 0) -> Block | None:
        """Return a block, or None if the device has no room. Source: ``malloc``."""
        wanted = rounded(size)
        pool = Pool(stream, wanted <= LARGEST_SMALL)
        block = self._cached(pool, wanted) or self._new(pool, wanted)
        if block is None:
            self.release()
            block = self._new(pool, wanted)
        if block is None:
            return None
        self._split(block, wanted)
        block.is_free = False
        self.allocated_bytes += block.size
        return block

    def free(self, block: Block) -> None:
        """Keep a block for later, joined with free neighbours. Source: ``free_block``."""
        self.allocated_bytes -= block.size
        block.is_free = True
        self._join(block)
        insort(self._free.setdefault(block.pool, []), block)

    def release(self) -> None:
        """Give the device what is wholly free. Source: ``release_cached_blocks``."""
        for blocks in self._free.values():
            for block in blocks[:]:
                if self.expandable:
                    self._unmap(block)
                elif block.previous is None and block.next is None:
                    remove(blocks, block)
                    self.reserved_bytes -= block.size

    def _cached(self, pool: Pool, wanted: int) -> Block | None:
        """Take the free block that fits best. Source: ``get_free_block``.

        The free end of an expandable segment counts as large as it can become, so that what
        cannot grow is used up first.
        """
        blocks = self._free.get(pool)
        if not blocks:
            return None
        place = bisect_left(blocks, wanted, key=size_of)
        if place == len(blocks):
            return None
        if self.expandable:
            while place + 1 < len(blocks) and room(blocks[place + 1]) < room(blocks[place]):
                place += 1
        return blocks.pop(place)

    def _new(self, pool: Pool, wanted: int) -> Block | None:
        """Take memory from the device. Source: ``alloc_block``."""
        if self.expandable:
            return self._expanded(pool, wanted)
        size = segment_size(wanted)
        if not self._reserve(size):
            return None
        return self._at_new_address(pool, size)

    def _at_new_address(self, pool: Pool, size: int, *, is_mapped: bool = True) -> Block:
        block = Block(pool, self._next_address, size, is_mapped=is_mapped)
        # Segments begin at a multiple of either page, so that pages can be told by address.
        self._next_address += -(-size // LARGE_SEGMENT) * LARGE_SEGMENT
        return block

    def _reserve(self, size: int) -> bool:
        if self.reserved_bytes + size > self.capacity_bytes:
            return False
        self.reserved_bytes += size
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        return True

    def _split(self, block: Block, wanted: int) -> None:
        """Cut what is left off a block, if it is worth it. Source: ``should_split``."""
        left = block.size - wanted
        fine = self.expandable or block.pool.is_small
        if left < SMALLEST_BLOCK if fine else left <= LARGEST_SMALL:
            return
        rest = Block(block.pool, block.address + wanted, left)
        rest.is_free = True
        splice(rest, after=block)
        block.size = wanted
        insort(self._free.setdefault(block.pool, []), rest)

    def _join(self, block: Block) -> None:
        """Join a free block with its neighbours of the same kind. Source: ``try_merge_blocks``."""
        lists = self._free if block.is_mapped else self._unmapped
        before = block.previous
        if before is not None and before.is_free and before.is_mapped == block.is_mapped:
            remove(lists[block.pool], before)
            block.address = before.address
            block.size += before.size
            unlink(before)
        after = block.next
        if after is not None and after.is_free and after.is_mapped == block.is_mapped:
            remove(lists[block.pool], after)
            block.size += after.size
            unlink(after)

    def _expanded(self, pool: Pool, wanted: int) -> Block | None:
        """Map more of an expandable segment. Source: ``try_allocate_expandable_block``."""
        block = self._candidate(pool, wanted)
        if not block.is_mapped and not self._map(block, min(block.size, wanted)):
            return None
        while block.size < wanted:
            following = block.next
            assert following is not None
            if not self._map(following, min(wanted - block.size, following.size)):
                return None
            block = following
        remove(self._free[pool], block)
        return block

    def _candidate(self, pool: Pool, wanted: int) -> Block:
        """Return where room begins, at the lowest address. Source: ``find_expandable_block``."""
        for block in sorted(self._unmapped.get(pool, ()), key=lambda each: each.address):
            before = block.previous
            first = before if before is not None and before.is_free else block
            found, each = 0, first
            while each is not None and each.is_free and found < wanted:
                found += each.size
                each = each.next  # type: ignore[assignment]
            if found >= wanted:
                return first
        pages = -(-(self.capacity_bytes + self.capacity_bytes // 8) // pool.page)
        new = self._at_new_address(pool, max(pages, 1) * pool.page, is_mapped=False)
        insort(self._unmapped.setdefault(pool, []), new)
        return new

    def _map(self, block: Block, size: int) -> bool:
        """Map whole pages at the start of an unmapped block. Source: ``map_block``."""
        mapped = min(-(-size // block.pool.page) * block.pool.page, block.size)
        if not self._reserve(mapped):
            return False
        unmapped = self._unmapped[block.pool]
        remove(unmapped, block)
        if mapped < block.size:
            rest = Block(block.pool, block.address + mapped, block.size - mapped, is_mapped=False)
            splice(rest, after=block)
            insort(unmapped, rest)
            block.size = mapped
        block.is_mapped = True
        self._join(block)
        insort(self._free.setdefault(block.pool, []), block)
        return True

    def _unmap(self, block: Block) -> None:
        """Give back the whole pages within a free block. Source: ``unmap_block``."""
        page = block.pool.page
        start = -(-block.address // page) * page
        end = (block.address + block.size) // page * page
        if start >= end:
            return
        remove(self._free[block.pool], block)
        before, after = start - block.address, block.address + block.size - end
        if before:
            self._keep(Block(block.pool, block.address, before), after=block.previous, of=block)
        if after:
            self._keep(Block(block.pool, end, after), after=block, of=block)
        block.address, block.size, block.is_mapped = start, end - start, False
        self.reserved_bytes -= block.size
        self._join(block)
        insort(self._unmapped[block.pool], block)

    def _keep(self, part: Block, *, after: Block | None, of: Block) -> None:
        part.is_free = True
        if after is None:
            part.next, of.previous = of, part
        else:
            splice(part, after=after)
        insort(self._free[part.pool], part)


def reserved_peak(
    ledger: Ledger, micro_batch_size: int, capacity_bytes: int, *, expandable: bool = True
) -> int | None:
    """Return the most bytes that a ledger reserves, or None if it runs out of memory.

    Args:
        ledger: what a rank takes and gives back.
        micro_batch_size: samples on the rank.
        capacity_bytes: what the device can give to the allocator.
        expandable: whether ``expandable_segments:True`` is set.
    """
    allocator = CachingAllocator(capacity_bytes, expandable=expandable)
    blocks: dict[Key, Block] = {}
    for entry in ledger.entries:
        if not entry.taken:
            block = blocks.pop(entry.key, None)
            if block is not None:
                allocator.free(block)
            continue
        size = entry.size.at(micro_batch_size)
        if size <= 0:
            continue
        block = allocator.allocate(size, entry.stream)
        if block is None:
            return None
        blocks[entry.key] = block
    return allocator.peak_reserved_bytes


def largest_that_fits(
    ledger: Ledger, capacity_bytes: int, at_most: int, *, expandable: bool = True
) -> int:
    """Return the largest micro-batch size that does not run out of memory; 0: not even one sample.

    Args:
        ledger: what a rank takes and gives back.
        capacity_bytes: what the device can give to the allocator.
        at_most: the largest that is tried, such as what fits without any fragmentation.
        expandable: whether ``expandable_segments:True`` is set.
    """
    fits, fails, tried = 0, at_most + 1, at_most
    while fits + 1 < fails:
        if reserved_peak(ledger, tried, capacity_bytes, expandable=expandable) is None:
            fails = tried
        else:
            fits = tried
        # Fragmentation costs a few samples: look just below before halving what is left.
        tried = fails - 1 if at_most - fails < 2 else (fits + fails) // 2
    return fits
