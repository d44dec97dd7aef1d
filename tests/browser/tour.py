"""One session in JupyterLab, played through and noted down.

Starting JupyterLab, a browser and engines takes most of the time, so everything that is to be
seen there is seen in one go. The pictures are taken on the way: set ``FSDP_MAGIC_SCREENSHOTS`` to
a directory to keep them.
"""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lab import Notebook, Server, Theme

ATTACK = "<img src=x onerror=hacked=1>"
"""Text that would run a script where it is taken for HTML."""

(
    LOAD, INIT, CELL, MODEL, TRAIN, QUEUED, AFTER, SHOWN, RAISES, WRONG, LATER, STATUS, TUNE, SIZED,
    TYPED,
) = range(15)  # fmt: skip
CELLS = {
    LOAD: "%load_ext fsdp_magic",
    INIT: "%fsdp_init -n 2 --device cpu",
    CELL: """%%fsdp
import time
import torch
from torch import nn
from tqdm import tqdm
torch.distributed.barrier()
print('ready')
print(f'this is rank {rank}')""",
    MODEL: f"""%%fsdp_model
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        return x + self.second(torch.relu(self.first(x)))

model = nn.Sequential(nn.Linear(16, 64), *(Block() for _ in range(4)), nn.Linear(64, 8))
model.add_module("{ATTACK}", nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
samples = torch.randn(64, 16)""",
    TRAIN: """%%fsdp_train --steps 2000
time.sleep(0.05)
loss = model(torch.randn(8, 16)).square().mean()""",
    QUEUED: "print('the queued cell ran')",
    AFTER: "%%fsdp\nprint('the session goes on')",
    SHOWN: """%%fsdp
from IPython.display import HTML
for _ in tqdm(range(40), desc="reading"):
    time.sleep(0.1)
torch.distributed.barrier()
HTML("<b class='shown-by-ranks'>shown by all ranks</b>")""",
    RAISES: f'%%fsdp\nif rank == 1:\n    raise ValueError("{ATTACK}")',
    WRONG: "%fsdp_init --devise cpu",
    LATER: """%%fsdp_train --steps 160
time.sleep(0.05)
loss = model(torch.randn(8, 16)).square().mean()""",
    STATUS: "%fsdp_status",
    TUNE: """%%fsdp_tune --data samples --objective throughput --max 16
time.sleep(0.15)
loss = model(batch).square().mean()""",
    SIZED: "%%fsdp_train --data samples --steps 2\nloss = model(batch).square().mean()",
    TYPED: "",
}
_PICTURED = {
    "init": INIT, "output": CELL, "mosaic": MODEL, "stopped": TRAIN, "display": SHOWN,
    "error": RAISES, "refused": WRONG, "status": STATUS, "tuner": TUNE,
}  # fmt: skip
_THEMES: dict[str, Theme] = {"light": "JupyterLab Light", "dark": "JupyterLab Dark"}
_STEP = re.compile(r"(\d+)/2,000")
_COLOURED = (
    "boxes => boxes.filter(box => box.getBoundingClientRect().width > 1 && "
    "getComputedStyle(box).backgroundColor.startsWith('rgb(')).length"
)


@dataclass(slots=True, kw_only=True)
class Seen:
    """What was seen.

    Attributes:
        progress: kernel's status and steps done, each time somebody looked during the run.
        running: text under the training cell while it ran.
        bar: text under the cell with a progress bar while it ran.
        prompts: of all cells after the interrupt.
        stopping_seconds: from the interrupt until the kernel was idle.
        output: text under each cell at the end, as it is seen.
        options: what the page offered to complete an option.
        names: what it offered to complete an attribute of a name that engines have.
        open_rows: rows of the mosaic that were open after other cells had run.
        shown_html: elements that a rank displayed as HTML.
        tuning: the kernel's status and the text under the tuner's cell while it searched.
        slid: what the slider said before and after an arrow key was pressed on it.
        reloaded: the kernel's status and the text of a run's panel after a reload in its midst.
        background: of the page in the dark theme.
        saved: outputs of each cell in the file.
        copy_status: the kernel's status in a copy that was opened elsewhere.
        copy: text under the cells of that copy.
        pictures: widths of the images that the copy could draw.
        chart_width: of the tuner's picture in the copy.
        bars: how many coloured boxes the copy drew, by cell.
        attacks: scripts or images that text brought into a page, by page.
    """

    progress: list[tuple[str | None, int]] = field(default_factory=list)
    running: str = ""
    bar: str = ""
    prompts: list[str] = field(default_factory=list)
    stopping_seconds: float = 0.0
    output: dict[int, str] = field(default_factory=dict)
    options: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    open_rows: int = 0
    shown_html: int = 0
    tuning: tuple[str | None, str] = (None, "")
    slid: tuple[str, str] = ("", "")
    reloaded: tuple[str | None, str] = (None, "")
    background: str = ""
    saved: list[list[dict[str, Any]]] = field(default_factory=list)
    copy_status: str | None = ""
    copy: dict[int, str] = field(default_factory=dict)
    pictures: list[int] = field(default_factory=list)
    chart_width: int = 0
    bars: dict[int, int] = field(default_factory=dict)
    attacks: dict[str, Any] = field(default_factory=dict)


def play(notebook: Notebook, server: Server, seen: Seen, pictures: Path) -> None:
    """Do what a person does, and note what the page shows."""
    train_and_interrupt(notebook, seen, pictures)
    go_on(notebook, seen, pictures)
    complete(notebook, seen, pictures)
    reload(notebook, seen)
    tune(notebook, seen, pictures)
    look(notebook, seen, pictures)
    keep(notebook, seen)
    open_a_copy(notebook, server, seen, pictures)


def train_and_interrupt(notebook: Notebook, seen: Seen, pictures: Path) -> None:
    """Run all cells, watch the training cell, and press stop."""
    notebook.wait_for_kernel()
    notebook.command("notebook:run-all-cells")
    notebook.wait_for_output(TRAIN, r"[1-9]\d*/2,000")
    for _ in range(2):
        steps = _STEP.search(notebook.output(TRAIN))
        assert steps is not None, notebook.output(TRAIN)
        seen.progress.append((notebook.kernel_status, int(steps[1])))
        notebook.page.wait_for_timeout(1500)
    seen.running = notebook.output(TRAIN)
    for word, theme in reversed(_THEMES.items()):
        notebook.use_theme(theme)
        notebook.cell(TRAIN).screenshot(path=pictures / f"running_{word}.png")
    interrupted_at = time.monotonic()
    notebook.command("notebook:interrupt-kernel")
    notebook.wait_until_idle()
    seen.stopping_seconds = time.monotonic() - interrupted_at
    seen.prompts = [notebook.prompt(index) for index in sorted(CELLS)]


def go_on(notebook: Notebook, seen: Seen, pictures: Path) -> None:
    """Open a row of the mosaic, and run the cells that follow."""
    notebook.cell(MODEL).locator("summary").first.click()
    notebook.run_cell(AFTER)
    notebook.start_cell(SHOWN)
    notebook.wait_for_output(SHOWN, r"reading: +[1-9]\d?%")
    seen.bar = notebook.output(SHOWN)
    notebook.wait_until_idle()
    for index in (RAISES, WRONG):
        notebook.run_cell(index)
    seen.shown_html = notebook.cell(SHOWN).locator("b.shown-by-ranks").count()
    seen.open_rows = notebook.cell(MODEL).locator("details[open]").count()
    notebook.cell(MODEL).screenshot(path=pictures / "mosaic_open_light.png")


def complete(notebook: Notebook, seen: Seen, pictures: Path) -> None:
    """Press Tab behind half an option, and behind half an attribute."""
    seen.options = notebook.completions(TYPED, "%%fsdp_train --m")
    notebook.page.screenshot(path=pictures / "completion_light.png")
    notebook.clear()
    notebook.use_theme(_THEMES["dark"])
    seen.names = notebook.completions(TYPED, "%%fsdp\nmodel.named_")
    notebook.page.screenshot(path=pictures / "completion_dark.png")
    notebook.clear()
    notebook.settle("notebook:enter-command-mode")


def reload(notebook: Notebook, seen: Seen) -> None:
    """Load the page anew while a run is under way, and ask for its panel once it has ended."""
    notebook.start_cell(LATER)
    notebook.wait_for_output(LATER, r"[1-9]\d*/")
    notebook.settle("docmanager:save")
    notebook.reload()
    seen.reloaded = (notebook.kernel_status, notebook.output(LATER))
    notebook.wait_until_idle()
    notebook.run_cell(STATUS)


def tune(notebook: Notebook, seen: Seen, pictures: Path) -> None:
    """Watch a search for the batch size, move the slider, and train with what it says."""
    notebook.start_cell(TUNE)
    notebook.wait_for_output(TUNE, r"trying (8|16) ")
    seen.tuning = (notebook.kernel_status, notebook.output(TUNE))
    notebook.cell(TUNE).screenshot(path=pictures / "tuning_dark.png")
    notebook.wait_until_idle()
    slider = notebook.cell(TUNE).locator("input[type=range]")
    answer = notebook.cell(TUNE).get_by_role("status")
    slider.focus()
    before = answer.inner_text()
    notebook.page.keyboard.press("ArrowLeft")
    notebook.wait_for_output(TUNE, "next %%fsdp_train uses 15")
    seen.slid = (before, answer.inner_text())
    notebook.run_cell(SIZED)


def look(notebook: Notebook, seen: Seen, pictures: Path) -> None:
    """Take the pictures in both themes, and note the text of every cell."""
    for word, theme in _THEMES.items():
        notebook.use_theme(theme)
        for name, index in _PICTURED.items():
            notebook.cell(index).screenshot(path=pictures / f"{name}_{word}.png")
    seen.background = notebook.page.evaluate(
        "getComputedStyle(document.querySelector('.jp-Notebook')).backgroundColor"
    )
    seen.output = {index: notebook.output(index) for index in CELLS}
    seen.attacks["page"] = _attacks(notebook)


def keep(notebook: Notebook, seen: Seen) -> None:
    """Save the notebook and end its kernel."""
    notebook.settle("docmanager:save")
    notebook.settle("kernelmenu:shutdown")
    saved = json.loads(notebook.path.read_text())
    seen.saved = [cell["outputs"] for cell in saved["cells"]]
    # as it arrives on another machine: untrusted, and no kernel of its name there
    saved["metadata"] = {}
    notebook.path.with_name("copy.ipynb").write_text(json.dumps(saved))


def open_a_copy(notebook: Notebook, server: Server, seen: Seen, pictures: Path) -> None:
    """Open the saved file as somebody else would."""
    copy = Notebook(notebook.page, server, "copy.ipynb")
    dialog = copy.page.get_by_role("dialog")
    dialog.get_by_role("button", name="No Kernel").click()
    copy.page.wait_for_selector(".jp-Dialog", state="detached")
    seen.copy_status = copy.kernel_status
    seen.copy = {index: copy.output(index) for index in CELLS}
    images = copy.cell(TRAIN).locator("img")
    seen.pictures = images.evaluate_all("images => images.map(image => image.naturalWidth)")
    seen.chart_width = copy.cell(TUNE).locator("img").first.evaluate("image => image.naturalWidth")
    copy.cell(TUNE).screenshot(path=pictures / "untrusted_tuner_dark.png")
    for index in (MODEL, TRAIN):
        seen.bars[index] = copy.cell(index).locator("td *").evaluate_all(_COLOURED)
    copy.cell(TRAIN).screenshot(path=pictures / "untrusted_dark.png")
    seen.attacks["copy"] = _attacks(copy)


def _attacks(notebook: Notebook) -> Any:
    return notebook.page.evaluate(
        "[window.hacked ?? null, document.querySelectorAll('img[src=x]').length]"
    )
