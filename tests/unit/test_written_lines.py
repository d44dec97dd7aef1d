"""Every magic's line in the README and in the notebooks can be typed as it is written."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest

from fsdp_magic.core.specs import MAGICS
from fsdp_magic.notebook.options import parse

ROOT = Path(__file__).parents[2]
_LINE = re.compile(r"(?:\w+ = )?(%%?fsdp\w*)(.*)")
SPECS = {magic.lstrip("%"): spec for magic, spec in MAGICS.items()}


def written() -> Iterator[tuple[str, str]]:
    """Yield where a line is written, and the line."""
    fenced = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    for line in "".join(fenced).splitlines():
        yield "README.md", line
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        notebook = nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]
        for cell in notebook.cells:
            if cell.cell_type == "code":
                yield path.name, cell.source.partition("\n")[0]


FOUND = [(place, *match.groups()) for place, line in written() if (match := _LINE.match(line))]


@pytest.mark.parametrize(("place", "magic", "rest"), FOUND)
def test_a_line_that_is_written_down_can_be_typed(place: str, magic: str, rest: str) -> None:
    parse(rest, SPECS[magic.lstrip("%")], magic=magic)


def test_every_magic_of_a_training_is_written_down() -> None:
    shown = {magic.lstrip("%") for place, magic, _ in FOUND if place == "README.md"}
    assert {"fsdp_init", "fsdp", "fsdp_model", "fsdp_tune", "fsdp_train", "fsdp_plan"} <= shown
