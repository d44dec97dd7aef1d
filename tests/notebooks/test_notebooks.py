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
SHORTER = {
    "quickstart.ipynb": {"--steps 400": "--steps 100", "max_new_tokens=120": "max_new_tokens=30"},
    "finetune.ipynb": {"--epochs 6": "--epochs 1"},
    "strategies.ipynb": {
        "n_layer=6": "n_layer=2",
        "n_embd=256": "n_embd=64",
        "%fsdp_compare --steps 6": "%fsdp_compare --steps 2",
        "--steps 4 --strategies full_shard,": "--steps 2 --strategies full_shard,",
        "unwrapped = %fsdp_compare --steps 4": "unwrapped = %fsdp_compare --steps 2",
    },
}
"""What is written otherwise where every commit runs it; ``make nightly`` runs them whole."""
EVERY_COMMIT = tuple(SHORTER)
PANEL, MOSAIC = 'aria-label="Training run: Done"', 'aria-label="Placement"'

Execute = Callable[..., Any]
"""From the name of a notebook, and whether whole, to the notebook with its outputs."""


@pytest.fixture(scope="module")
def executed(test_run: str, tmp_path_factory: pytest.TempPathFactory) -> Execute:
    """Return a function that runs a notebook, once, where no file of the person's is seen."""

    @cache
    def execute(name: str, *, whole: bool = False) -> Any:
        home = str(tmp_path_factory.mktemp("home"))
        notebook = nbformat.read(ROOT / name, as_version=4)  # type: ignore[no-untyped-call]
        if not whole:
            shorten(notebook, SHORTER.get(name, {}))
        client = NotebookClient(
            notebook, timeout=LONGEST_SECONDS, resources={"metadata": {"path": home}}
        )
        places = {"HOME": home, "IPYTHONDIR": home, "CUDA_VISIBLE_DEVICES": ""}
        client.execute(env=os.environ | places)
        return notebook

    return execute


def shorten(notebook: Any, otherwise: dict[str, str]) -> None:
    """Write other numbers where a notebook has those of a long run."""
    for number, smaller in otherwise.items():
        (cell,) = (cell for cell in notebook.cells if number in cell.source)
        cell.source = cell.source.replace(number, smaller)


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


def red(notebook: Any) -> list[Any]:
    """Return what people see in red."""
    return [
        output
        for output in outputs(notebook)
        if output.output_type == "error" or output.get("name") == "stderr"
    ]


def learned(notebook: Any) -> tuple[float, float]:
    """Return the last loss of the quickstart's run, and its seconds."""
    words = printed(notebook)
    loss = re.search(r"mean of the last ten ([\d.]+)", words)
    seconds = re.search(r"<Run 1: done, .*, ([\d.]+) s>", words)
    assert loss is not None
    assert seconds is not None
    return float(loss[1]), float(seconds[1])


@pytest.mark.parametrize("name", EVERY_COMMIT)
def test_every_notebook_runs_and_says_nothing_red(executed: Execute, name: str) -> None:
    assert red(executed(name)) == []


def test_the_quickstart_learns(executed: Execute) -> None:
    loss, _ = learned(executed("quickstart.ipynb"))
    assert loss < 3.0


@pytest.mark.nightly
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_every_notebook_runs_whole_and_says_nothing_red(executed: Execute, name: str) -> None:
    assert red(executed(name, whole=True)) == []


@pytest.mark.nightly
def test_the_whole_quickstart_learns_within_two_minutes(executed: Execute) -> None:
    loss, seconds = learned(executed("quickstart.ipynb", whole=True))
    assert loss < 2.6
    assert seconds < 120


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
