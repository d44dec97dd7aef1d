r"""Peaks and largest batches that others have published, beside what the planner says of them.

``held_out.json`` holds the reports, written down and committed before any was predicted. What each
ran is in ``published/reports.py``; nothing of the planner was changed for what comes out here.

    python benchmarks/held_out.py [REPORT…] > benchmarks/results/held_out.json \
        2> benchmarks/results/held_out.txt
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from published.reports import REPORTS
from side_by_side import machine, say


def beside(cell: dict[str, Any], prediction: Any) -> dict[str, Any]:
    """Return a cell with what was predicted, and how far off that is.

    ``error``: relative, from the nearer end of a range; 0 inside it.
    """
    ends = prediction if isinstance(prediction, tuple) else (prediction,)
    shown = {**cell, "predicted": prediction}
    if isinstance(prediction, str) or not isinstance(cell["value"], int | float):
        return shown
    low, high, value = min(ends), max(ends), cell["value"]
    shown["predicted"] = [round(end, 2) for end in ends]
    nearest = min(max(value, low), high)
    if "batch" in cell["of"]:
        shown["off_by"] = nearest - value
    else:
        shown["error"] = round(nearest / value - 1, 4)
    return shown


def line(cell: dict[str, Any]) -> str:
    """Return a cell as text."""
    predicted = cell["predicted"]
    if isinstance(predicted, list | tuple):
        predicted = " to ".join(f"{end:g}" for end in dict.fromkeys(predicted))
    off = ""
    if "error" in cell:
        off = f"{cell['error']:+.1%}" if cell["error"] else "inside"
    elif "off_by" in cell:
        off = f"{cell['off_by']:+g}" if cell["off_by"] else "inside"
    return f"  {cell['name']:54}{cell['of']:18}{cell['value']!s:>26}   {predicted}   {off}"


def main(names: list[str]) -> int:
    """Predict all reports, or those named."""
    known = json.loads((Path(__file__).parent / "held_out.json").read_text())
    reports = []
    for report in known["reports"]:
        name = report["name"]
        if names and name not in names:
            continue
        started = time.monotonic()
        predictions = REPORTS[name]()
        cells = [beside(cell, predictions[cell["name"]]) for cell in report["cells"]]
        reports.append({**report, "cells": cells})
        say(f"{report['title']} ({report['address']})")
        say("\n".join(map(line, cells)))
        for what, how in report["open"].items():
            say(f"  open: {what}: {how}")
        say(f"  {time.monotonic() - started:.0f} s\n")
    errors = sorted(abs(c["error"]) for r in reports for c in r["cells"] if "error" in c)
    result = {
        "benchmark": "held_out",
        "machine": machine(),
        "reports": reports,
        "cells": sum(len(r["cells"]) for r in reports),
        "median_error": errors[len(errors) // 2] if errors else None,
        "worst_error": errors[-1] if errors else None,
    }
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
