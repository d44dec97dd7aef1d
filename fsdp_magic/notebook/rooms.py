"""KERNEL: what there is room for on every rank, and whether peaks fit into it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fsdp_magic.core.tuning import RoomReport


class Rooms:
    """The room of every rank.

    Args:
        reports: of the ranks.
        margin: the share of each device that stays free.
    """

    def __init__(self, reports: Mapping[int, RoomReport], margin: float) -> None:
        self._reports = reports
        self._margin = margin

    @property
    def most_samples(self) -> int | None:
        """The largest micro-batch size of which the data fill a step; None: not known."""
        return self._reports[0].most_samples

    @property
    def capacity_bytes(self) -> int:
        """What tensors may take on the rank with least, the margin included."""
        return min(report.room_bytes for report in self._reports.values())

    @property
    def held_bytes(self) -> int:
        """The most that is allocated on a rank before any step."""
        return max(report.held_bytes for report in self._reports.values())

    @property
    def other_bytes(self) -> int:
        """The most of that which is neither parameter, gradient nor optimizer state."""
        return max(report.other_bytes for report in self._reports.values())

    def free(self, rank: int) -> float:
        """Return what tensors may take on a rank, without the margin."""
        report = self._reports[rank]
        return report.room_bytes - self._margin * report.capacity_bytes

    @property
    def least(self) -> float:
        """What they may take on the rank with least, without the margin."""
        return min(map(self.free, self._reports))

    def judged(self, peaks: Sequence[int]) -> tuple[int, str]:
        """Return the peak that counts, and why it does not fit; nothing: it does.

        The peak is that of the rank nearest to its end, as if it had the room of the one with
        least.
        """
        beyond = [peak - self.free(rank) for rank, peak in enumerate(peaks)]
        most = max(beyond)
        load = round(self.least + most)
        if most <= 0:
            return load, ""
        rank = beyond.index(most)
        report = self._reports[rank]
        left = (report.room_bytes - peaks[rank]) / max(1, report.capacity_bytes)
        what = f"leaves {100 * left:.1f} % free" if left > 0 else "takes more than there is"
        return load, f"{what} on rank {rank}"
