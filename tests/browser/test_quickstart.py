"""What a person sees in JupyterLab: told once in a browser, then looked at from every side.

Starting JupyterLab, a browser and engines takes most of the time, so one session is played
through and noted down; each test reads the notes.
"""

from __future__ import annotations

import base64
import json
import os
import re
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from lab import Notebook, Server, chromium, jupyterlab, missing, write_notebook

pytestmark = pytest.mark.timeout(150)  # the first test waits for the whole session

LOAD, INIT, CELL, MODEL, TRAIN, QUEUED, AFTER, STATUS, WRONG = range(9)
CELLS = {
    LOAD: "%load_ext fsdp_magic",
    INIT: "%fsdp_init -n 2 --device cpu",
    CELL: "%%fsdp\nimport time\nimport torch\nfrom torch import nn\nprint('ready')",
    MODEL: """%%fsdp_model
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        return x + self.second(torch.relu(self.first(x)))

model = nn.Sequential(nn.Linear(16, 64), *(Block() for _ in range(4)), nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)""",
    TRAIN: """%%fsdp_train --steps 2000
time.sleep(0.05)
loss = model(torch.randn(8, 16)).square().mean()""",
    QUEUED: "print('the queued cell ran')",
    AFTER: "%%fsdp\nprint('the session goes on')",
    STATUS: "%fsdp_status",
    WRONG: "%fsdp_init --devise cpu",
}
_STEP = re.compile(r"(\d+)/2,000")


@dataclass(slots=True, kw_only=True)
class Seen:
    """What was seen.

    Attributes:
        progress: kernel's status and steps done, each time somebody looked during the run.
        training: text under the training cell: running, and in the end.
        prompts: of all cells after the interrupt.
        stopping_seconds: from the interrupt until the kernel was idle.
        after: text under the cell that ran later.
        refused: text under the cell with a wrong option.
        saved: outputs of each cell in the file.
        copy_status: the kernel's status in a copy that was opened elsewhere.
        copy: text under the cells of that copy.
        pictures: widths of the images that it could draw.
        bars: how many coloured boxes it drew, by cell.
    """

    progress: list[tuple[str | None, int]] = field(default_factory=list)
    training: list[str] = field(default_factory=list)
    prompts: list[str] = field(default_factory=list)
    stopping_seconds: float = 0.0
    after: str = ""
    refused: str = ""
    saved: list[list[dict[str, Any]]] = field(default_factory=list)
    copy_status: str | None = ""
    copy: list[str] = field(default_factory=list)
    pictures: list[int] = field(default_factory=list)
    bars: dict[int, int] = field(default_factory=dict)


@pytest.fixture(scope="module")
def seen(test_run: str, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """Play the session, end everything, and return what was seen."""
    if reason := missing():
        if os.environ.get("FSDP_MAGIC_REQUIRE_BROWSER") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    directory = tmp_path_factory.mktemp("lab")
    pictures = Path(os.environ.get("FSDP_MAGIC_SCREENSHOTS") or directory / "screenshots")
    pictures.mkdir(parents=True, exist_ok=True)
    seen = Seen()
    with jupyterlab(directory) as server, chromium(directory) as page:
        write_notebook(server.root / "tour.ipynb", [CELLS[index] for index in sorted(CELLS)])
        try:
            notebook = Notebook(page, server, "tour.ipynb")
            _train_and_interrupt(notebook, seen, pictures)
            _go_on(notebook, seen, pictures)
            _keep(notebook, seen)
            _open_a_copy(notebook, server, seen, pictures)
        except Exception:
            page.screenshot(path=pictures / "failure.png")
            print(page.locator("body").inner_text())
            raise
    return seen


def _train_and_interrupt(notebook: Notebook, seen: Seen, pictures: Path) -> None:
    notebook.wait_for_kernel()
    notebook.command("notebook:run-all-cells")
    notebook.page.wait_for_function(
        "n => /[1-9][0-9]*\\/2,000/.test("
        "document.querySelectorAll('.jp-Notebook .jp-Cell')[n].innerText)",
        arg=TRAIN,
        timeout=60_000,
    )
    for _ in range(2):
        text = notebook.output(TRAIN)
        steps = _STEP.search(text)
        assert steps is not None, text
        seen.progress.append((notebook.kernel_status, int(steps[1])))
        notebook.page.wait_for_timeout(1500)
    seen.training.append(notebook.output(TRAIN))
    notebook.cell(TRAIN).screenshot(path=pictures / "running_light.png")
    interrupted_at = time.monotonic()
    notebook.command("notebook:interrupt-kernel")
    notebook.wait_until_idle()
    seen.stopping_seconds = time.monotonic() - interrupted_at
    seen.prompts = [notebook.prompt(index) for index in sorted(CELLS)]


def _go_on(notebook: Notebook, seen: Seen, pictures: Path) -> None:
    for index in (AFTER, STATUS, WRONG):
        notebook.run_cell(index)
    seen.after = notebook.output(AFTER)
    seen.refused = notebook.output(WRONG)
    seen.training.append(notebook.output(TRAIN))
    for word, theme in (("light", "JupyterLab Light"), ("dark", "JupyterLab Dark")):
        notebook.use_theme(theme)
        for name, index in (("mosaic", MODEL), ("stopped", TRAIN), ("status", STATUS)):
            notebook.cell(index).screenshot(path=pictures / f"{name}_{word}.png")


def _keep(notebook: Notebook, seen: Seen) -> None:
    """Save the notebook and end its kernel."""
    notebook.settle("docmanager:save")
    notebook.settle("kernelmenu:shutdown")
    saved = json.loads(notebook.path.read_text())
    seen.saved = [cell["outputs"] for cell in saved["cells"]]
    # as it arrives on another machine: untrusted, and no kernel of its name there
    saved["metadata"] = {}
    notebook.path.with_name("copy.ipynb").write_text(json.dumps(saved))


def _open_a_copy(notebook: Notebook, server: Server, seen: Seen, pictures: Path) -> None:
    copy = Notebook(notebook.page, server, "copy.ipynb")
    dialog = copy.page.get_by_role("dialog")
    dialog.get_by_role("button", name="No Kernel").click()
    copy.page.wait_for_selector(".jp-Dialog", state="detached")
    seen.copy_status = copy.kernel_status
    seen.copy = [copy.output(index) for index in sorted(CELLS)]
    images = copy.cell(TRAIN).locator("img")
    seen.pictures = images.evaluate_all("images => images.map(image => image.naturalWidth)")
    for index in (MODEL, TRAIN):
        coloured = (
            "boxes => boxes.filter(box => box.getBoundingClientRect().width > 1 && "
            "getComputedStyle(box).backgroundColor.startsWith('rgb(')).length"
        )
        seen.bars[index] = copy.cell(index).locator("td *").evaluate_all(coloured)
    copy.cell(TRAIN).screenshot(path=pictures / "untrusted_dark.png")


# ---------------------------------------------------------------- a run under way


def test_progress_advances_while_the_kernel_is_busy(seen: Seen) -> None:
    statuses, steps = zip(*seen.progress, strict=True)
    assert statuses == ("busy", "busy")
    assert steps[0] < steps[1], f"the page stood still at {steps}"
    assert "Running" in seen.training[0]


def test_an_interrupt_stops_the_run_and_no_queued_cell_runs(seen: Seen) -> None:
    assert seen.stopping_seconds < 5
    assert "Stopped" in seen.training[-1]
    assert "Running" not in seen.training[-1]
    assert [prompt.strip("[]: ") for prompt in seen.prompts[: TRAIN + 1]] == list("12345")
    assert [prompt.strip("[]: ") for prompt in seen.prompts[QUEUED:]] == ["", "", "", ""]


def test_an_interrupt_is_one_line_beneath_the_panel(seen: Seen) -> None:
    last = seen.training[-1].strip().splitlines()[-1]
    assert re.fullmatch(r"Training stopped after step \d+\.", last)
    assert "Traceback" not in seen.training[-1]


def test_a_cell_after_the_interrupt_runs_on_the_same_engines(seen: Seen) -> None:
    assert seen.after.strip() == "[ranks 0-1] the session goes on"


def test_a_wrong_option_is_one_line(seen: Seen) -> None:
    assert len(seen.refused.strip().splitlines()) == 1
    assert "--devise" in seen.refused


# ---------------------------------------------------------------- what stays


def test_the_last_panel_and_the_mosaic_are_there_untrusted_and_without_a_kernel(
    seen: Seen,
) -> None:
    assert seen.copy_status is None
    for word in ("Stopped", "used at peak", "rank", "gradient norm"):
        assert word in seen.copy[TRAIN]
    for word in ("full_shard on 2 ranks", "rank 1", "{1…4}", "total"):
        assert word in seen.copy[MODEL]
    assert seen.pictures, "the loss is a picture"
    assert min(seen.pictures) > 100, "the picture could not be drawn"
    assert min(seen.bars.values()) >= 2, f"bars without a colour: {seen.bars}"


@pytest.mark.parametrize(
    ("index", "count", "limit_kib"),
    [(INIT, 1, 30), (MODEL, 1, 50), (TRAIN, 1, 30), (STATUS, 2, 30)],
)
def test_every_saved_panel_has_a_text_twin_and_stays_small(
    seen: Seen, index: int, count: int, limit_kib: int
) -> None:
    bundles = [output["data"] for output in seen.saved[index] if "data" in output]
    assert len(bundles) == count, "a panel, and no text of Out beneath it"
    for bundle in bundles:
        html, text = ("".join(bundle[kind]) for kind in ("text/html", "text/plain"))
        assert len(html.encode()) <= limit_kib * 1024
        assert text.strip()
        assert "<" not in text


def test_the_saved_chart_shows_the_whole_run(seen: Seen) -> None:
    html = "".join("".join(o["data"]["text/html"]) for o in seen.saved[TRAIN] if "data" in o)
    drawing = re.search(r"data:image/svg\+xml;base64,([^\"]+)", html)
    assert drawing is not None
    steps = re.search(r"Loss over (\d+) steps", base64.b64decode(drawing[1]).decode())
    assert steps is not None
    assert f"{steps[1]}/2,000" in seen.training[-1]
