"""ENGINE: the name of the processor, as a person would say it."""

from __future__ import annotations

import platform
import re
from functools import cache

_FILLING = re.compile(r"\((?:R|TM|C)\)|@.*|\b\d+-Core\b|\bwith .*|\bw/ .*", re.IGNORECASE)


@cache
def processor_name() -> str:
    """Return the processor's model, such as ``Intel Xeon Platinum 8581C``; else its kind.

    Source: ``model name`` of /proc/cpuinfo (proc(5)); some processors have none.
    """
    try:
        with open("/proc/cpuinfo") as file:
            lines = [line for line in file if line.startswith("model name")]
    except OSError:
        lines = []
    name = shortened(lines[0].partition(":")[2]) if lines else ""
    return name or platform.machine() or "CPU"


def shortened(name: str) -> str:
    """Return a processor's model without marks, clock and filling words."""
    words = _FILLING.sub(" ", name).split()
    return " ".join(word for word in words if word.lower() not in ("cpu", "processor"))
