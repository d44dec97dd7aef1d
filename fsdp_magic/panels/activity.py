"""How busy devices are, as columns of a table; a column that no rank has a value for is left out.

Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fsdp_magic.core.telemetry import DeviceSample
from fsdp_magic.core.units import UNKNOWN
from fsdp_magic.panels.parts import percent_text


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivityColumns:
    """Which columns there are."""

    utilisation: bool
    temperature: bool
    power: bool

    @classmethod
    def of(cls, activities: Sequence[DeviceSample]) -> ActivityColumns:
        """Return the columns that some ranks need."""
        return cls(
            utilisation=any(a.utilisation_percent is not None for a in activities),
            temperature=any(a.temperature_celsius is not None for a in activities),
            power=any(a.power_watts is not None for a in activities),
        )

    def heads(self, *, mean: str = "") -> list[str]:
        """Return the headings; ``mean`` stands before the first."""
        heads = [f"{mean}util"] if self.utilisation else []
        heads += ["°C"] if self.temperature else []
        return heads + (["W"] if self.power else [])

    def values(self, activity: DeviceSample) -> list[str]:
        """Return the numbers of a rank, as text."""
        values = [percent_text(activity.utilisation_percent)] if self.utilisation else []
        values += [_whole(activity.temperature_celsius)] if self.temperature else []
        return values + ([_whole(activity.power_watts)] if self.power else [])


def _whole(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.0f}"
