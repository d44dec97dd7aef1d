"""KERNEL: where the output of ranks is shown: a notebook's page, a terminal or nowhere."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from fsdp_magic.notebook import display
from fsdp_magic.notebook.terminal_block import is_terminal
from fsdp_magic.panels import progress_lines
from fsdp_magic.panels.progress_lines import ProgressLine


class Screen(Protocol):
    """What output needs of a place to be shown at.

    Attributes:
        is_rich: whether it shows more than text.
    """

    @property
    def is_rich(self) -> bool:
        """Whether it shows more than text."""

    def write(self, stream: str, text: str) -> None:
        """Write a labelled line, at the latest at the next ``flush``."""

    def flush(self) -> None:
        """Let everything written be seen."""

    def progress(self, lines: Sequence[ProgressLine], notes: Sequence[str], *, final: bool) -> None:
        """Show the lines that ranks rewrite, in the place of those before."""

    def display(self, bundle: Mapping[str, Any], metadata: Mapping[str, Any]) -> Any:
        """Show a MIME bundle, and return a handle that can show another in its place."""


class Page:
    """The output of the cell that runs in the notebook, or the terminal of a script."""

    def __init__(self) -> None:
        self._written: list[tuple[str, str]] = []
        self._progress = display.Panel()

    @property
    def is_rich(self) -> bool:
        """Whether this is a notebook."""
        return display.is_notebook()

    def write(self, stream: str, text: str) -> None:
        """Write a labelled line; many are written at once, since each write is a message."""
        self._written.append((stream, text))

    def flush(self) -> None:
        """Let everything written be seen."""
        for stream, lines in itertools.groupby(self._written, key=lambda line: line[0]):
            display.write(stream, "".join(text for _, text in lines))
        self._written.clear()

    def progress(self, lines: Sequence[ProgressLine], notes: Sequence[str], *, final: bool) -> None:
        """Draw one block; without a page or a terminal, the last state of each line."""
        self.flush()
        if self.is_rich or is_terminal(sys.stdout):
            block = progress_lines.html(lines, notes=notes), progress_lines.text(lines, notes=notes)
            self._progress.draw(*block, final=final)
        elif final:
            for line in lines:  # all of them, where a block shows the newest
                display.write("stderr", f"{progress_lines.text([line])}\n")
            for note in notes:
                display.write("stderr", f"{note}\n")

    def display(self, bundle: Mapping[str, Any], metadata: Mapping[str, Any]) -> Any:
        """Show a MIME bundle, as the person's own: nothing in it is changed."""
        self.flush()
        return display.bundle(bundle, metadata)


class Nowhere:
    """Shows nothing, where a person asked to see nothing."""

    is_rich = False

    def write(self, stream: str, text: str) -> None:
        """Do nothing."""

    def flush(self) -> None:
        """Do nothing."""

    def progress(self, lines: Sequence[ProgressLine], notes: Sequence[str], *, final: bool) -> None:
        """Do nothing."""

    def display(self, bundle: Mapping[str, Any], metadata: Mapping[str, Any]) -> Any:
        """Do nothing."""
