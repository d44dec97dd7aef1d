"""What panels cost: time and size of each, and the kernel's share of a core while one is live.

Rendering is timed in this process, as processor time. The live panel is drawn in a real kernel,
twice a second, over made-up reports of eight ranks, with a history of 100,000 losses, and the
kernel's processor time is compared with the same cell without a panel. No engines are started.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable
from typing import Any

from panel_records import placement, ranks_status, training_view
from side_by_side import Kernel, cpu_seconds, machine, say, summary

from fsdp_magic.panels import mosaic, status, training

MOST_BYTES_64, MOST_MILLISECONDS_64 = 60_000, 20.0
MOST_SHARE = 0.02
_TIMES, _ROUNDS, _SECONDS = 25, 5, 12.0

_CELL = """
from panel_records import follow
follow(seconds={seconds}, losses={losses}, show={show})
"""


def rendered(draw: Callable[[], str]) -> dict[str, Any]:
    """Return how long a panel takes to draw, in milliseconds of processor time, and its size."""
    source, took = draw(), []
    for _ in range(_TIMES):
        began = time.process_time()
        draw()
        took.append(1000 * (time.process_time() - began))
    return {"milliseconds": summary(took), "bytes": len(source.encode())}


def all_rendered() -> dict[str, dict[str, Any]]:
    """Return the figures of every panel, as HTML and as text."""
    drawn = {}
    for world in (8, 64):
        view, ranks, model = training_view(world), ranks_status(world), placement(world)
        panels: dict[str, tuple[Callable[[], str], Callable[[], str]]] = {
            "training": (lambda v=view: training.html(v), lambda v=view: training.text(v)),
            "status": (
                lambda r=ranks: status.html(r, stamp="12:00:00"),
                lambda r=ranks: status.text(r, stamp="12:00:00"),
            ),
            "mosaic": (lambda m=model: mosaic.html(m), lambda m=model: mosaic.text(m)),
        }  # fmt: skip
        for name, (html, text) in panels.items():
            drawn[f"{name}, {world} ranks"] = {"html": rendered(html), "text": rendered(text)}
    return drawn


def kernel_share(losses: int) -> dict[str, Any]:
    """Return the share of a core that drawing a live panel costs a kernel."""
    kernel = Kernel()
    try:
        shares: dict[bool, list[float]] = {True: [], False: []}
        frames = 0
        kernel.run(_CELL.format(seconds=1.0, losses=losses, show=True))  # imports and first uses
        for number in range(_ROUNDS):
            for show in (True, False) if number % 2 else (False, True):
                began = cpu_seconds(kernel.pid)
                answer = kernel.run(_CELL.format(seconds=_SECONDS, losses=losses, show=show))
                shares[show].append((cpu_seconds(kernel.pid) - began) / answer.seconds)
                frames = max(frames, answer.frames)
            say(f"{losses:,} losses: {shares[True][-1]:.4f} with, {shares[False][-1]:.4f} without")
    finally:
        kernel.close()
    costs = [math.fsum((a, -b)) for a, b in zip(shares[True], shares[False], strict=True)]
    return {
        "with_panel": summary(shares[True]),
        "without": summary(shares[False]),
        "panel": summary(costs),
        "frames": frames,
        "seconds": _SECONDS,
    }


def main() -> int:
    """Measure, print the result, and return 1 if a bound is missed."""
    on = machine()
    panels = all_rendered()
    large = [p["html"] for name, p in panels.items() if name.endswith("64 ranks")]
    live = {f"{losses} losses": kernel_share(losses) for losses in (1_000, 100_000)}
    passes = {
        "bytes": all(panel["bytes"] <= MOST_BYTES_64 for panel in large),
        "milliseconds": all(
            panel["milliseconds"]["median"] <= MOST_MILLISECONDS_64 for panel in large
        ),
        "share": all(figures["panel"]["median"] <= MOST_SHARE for figures in live.values()),
    }
    print(json.dumps({
        "benchmark": "panels",
        "passes": passes,
        "rendered": panels,
        "share_of_a_core": live,
        "bounds": {
            "bytes": MOST_BYTES_64, "milliseconds": MOST_MILLISECONDS_64, "share": MOST_SHARE,
        },
        "machine": on,
    }))  # fmt: skip
    return 0 if all(passes.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
