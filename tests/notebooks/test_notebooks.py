"""Every notebook runs from top to bottom on CPU engines, and shows what it promises."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from nbconvert import HTMLExporter

pytestmark = pytest.mark.timeout(270)

ROOT = Path(__file__).parents[2] / "notebooks"
NOTEBOOKS = sorted(path.name for path in ROOT.glob("*.ipynb"))
LONGEST_SECONDS = 240
PANEL, MOSAIC = 'aria-label="Training run: Done"', 'aria-label="Placement"'

Execute = Callable[[str], Any]
"""From the name of a notebook to the notebook with its outputs."""


@pytest.fixture(scope="module")
def executed(test_run: str, tmp_path_factory: pytest.TempPathFactory) -> Execute:
    """Return a function that runs a notebook, once, where no file of the person's is seen."""

    @cache
    def execute(name: str) -> Any:
        home = str(tmp_path_factory.mktemp("home"))
        notebook = nbformat.read(ROOT / name, as_version=4)  # type: ignore[no-untyped-call]
        client = NotebookClient(
            notebook, timeout=LONGEST_SECONDS, resources={"metadata": {"path": home}}
        )
        places = {"HOME": home, "IPYTHONDIR": home, "CUDA_VISIBLE_DEVICES": ""}
        client.execute(env=os.environ | places)
        return notebook

    return execute


def outputs(notebook: Any) -> list[Any]:
    return [output for cell in notebook.cells for output in cell.get("outputs", ())]


def printed(notebook: Any) -> str:
    return "".join(output.text for output in outputs(notebook) if output.output_type == "stream")


def panels(notebook: Any, mark: str) -> list[Any]:
    """Return the HTML and text of the panels that have a mark."""
    bundles = [output.data for output in outputs(notebook) if "data" in output]
    return [bundle for bundle in bundles if mark in bundle.get("text/html", "")]


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_is_committed_without_outputs(name: str) -> None:
    notebook = nbformat.read(ROOT / name, as_version=4)  # type: ignore[no-untyped-call]
    assert outputs(notebook) == []
    assert {cell.execution_count for cell in notebook.cells if cell.cell_type == "code"} == {None}


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_every_notebook_runs_and_says_nothing_red(executed: Execute, name: str) -> None:
    red = [
        output
        for output in outputs(executed(name))
        if output.output_type == "error" or output.get("name") == "stderr"
    ]
    assert red == []


def test_the_quickstart_learns_within_two_minutes(executed: Execute) -> None:
    words = printed(executed("quickstart.ipynb"))
    loss = re.search(r"mean of the last ten ([\d.]+)", words)
    seconds = re.search(r"<Run 1: done, .*, ([\d.]+) s>", words)
    assert loss is not None
    assert seconds is not None
    assert float(loss[1]) < 2.6
    assert float(seconds[1]) < 120


def test_the_quickstart_prints_a_sample_that_the_model_wrote(executed: Execute) -> None:
    notebook = executed("quickstart.ipynb")
    (cell,) = (cell for cell in notebook.cells if "model.generate(" in cell.source)
    words = "".join(output.text for output in cell.outputs)
    assert words.startswith("[ranks 0-1]     def ")
    assert len(words) > 40, "no more than the prompt"


def test_the_quickstart_shows_where_every_block_lives(executed: Execute) -> None:
    mosaic = panels(executed("quickstart.ipynb"), MOSAIC)[0]
    for twin in (mosaic["text/html"], mosaic["text/plain"]):
        for words in ("transformer.wte", "transformer.h.{0…3}", "×4", "rank 0", "rank 1"):
            assert words in twin
    assert "12 tensors in each of 4 equal blocks" in mosaic["text/html"]


def test_a_converted_quickstart_holds_the_last_panel_and_the_mosaic(executed: Execute) -> None:
    notebook = executed("quickstart.ipynb")
    page, _ = HTMLExporter().from_notebook_node(notebook)  # type: ignore[no-untyped-call]
    assert page.count(PANEL) == len(panels(notebook, PANEL)) == 2, "of the run and of the status"
    assert page.count(MOSAIC) == len(panels(notebook, MOSAIC)) == 1
    panel = panels(notebook, PANEL)[0]["text/html"]
    (chart,) = re.findall(r'src="(data:image/svg[^"]+)"', panel)
    assert chart in page
    assert "Training run: Running" not in page, "a frame that was not the last one"
