"""KERNEL: the values of last expressions, shown: equal ones once, rich where there is a page."""

from __future__ import annotations

from collections.abc import Mapping

from fsdp_magic.core.cell_output import ResultReport, shortened
from fsdp_magic.notebook.output import label
from fsdp_magic.notebook.screen import Screen


def show_results(results: Mapping[int, ResultReport], screen: Screen) -> None:
    """Show the results of a cell.

    Args:
        results: by rank.
        screen: where.
    """
    groups: list[tuple[ResultReport, list[int]]] = []
    for rank, result in sorted(results.items()):
        alike = next((ranks for other, ranks in groups if other == result), None)
        if alike is None:
            groups.append((result, [rank]))
        else:
            alike.append(rank)
    for result, ranks in groups:
        _show(result, label(tuple(ranks)), screen)
    screen.flush()


def _show(result: ResultReport, label: str, screen: Screen) -> None:
    if result.text is None or result.bundle is None:
        return
    if result.bundle and screen.is_rich:
        screen.write("stdout", f"{label}\n")
        screen.display(result.bundle, result.metadata)
        return
    text = shortened(result.bundle["text/plain"]) if result.bundle else result.text
    for line in text.split("\n"):
        screen.write("stdout", f"{label} {line}\n")
