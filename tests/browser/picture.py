"""Take the README's picture: the quickstart in JupyterLab, in the midst of its training run.

python tests/browser/picture.py notebooks/quickstart.png
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from lab import Notebook, chromium, jupyterlab

ROOT = Path(__file__).parents[2]
_WIDTH, _HEIGHT = 1100, 1200


def main() -> None:
    """Run the quickstart, and save what the page shows at two thirds of the run."""
    target = Path(sys.argv[1]).resolve()
    with (
        tempfile.TemporaryDirectory() as place,
        jupyterlab(Path(place)) as server,
        chromium(Path(place), width=_WIDTH, height=_HEIGHT) as page,
    ):
        shutil.copy(ROOT / "notebooks/quickstart.ipynb", server.root)
        notebook = Notebook(page, server, "quickstart.ipynb")
        notebook.wait_for_kernel()
        notebook.settle("application:toggle-mode")  # one document, no side bars
        notebook.command("notebook:run-all-cells")
        train = _index(notebook, "%%fsdp_train --data")
        notebook.wait_for_output(train, r"2[5-9]\d/400", seconds=240)
        first, last = (notebook.cell(index) for index in (_index(notebook, "%%fsdp_model"), train))
        first.scroll_into_view_if_needed()
        last.scroll_into_view_if_needed()
        above, below = first.bounding_box(), last.bounding_box()
        assert above is not None
        assert below is not None
        height = below["y"] + below["height"] - above["y"]
        page.screenshot(path=target, clip={**above, "height": height})
        notebook.command("notebook:interrupt-kernel")
        notebook.wait_until_idle()
        notebook.settle("kernelmenu:shutdown")


def _index(notebook: Notebook, start: str) -> int:
    """Return the number of the cell whose source begins so."""
    texts = notebook.page.locator(".jp-Notebook .jp-Cell").all_inner_texts()
    return next(number for number, text in enumerate(texts) if f"\n{start}" in f"\n{text}")


if __name__ == "__main__":
    main()
