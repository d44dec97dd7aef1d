"""The GPU script under pytest: the real one where there is a GPU, a rehearsal where there is none.

The rehearsal tests the script, so that it does not fail of itself on the day there is a card.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fsdp_magic.notebook.devices import gpu_count

SCRIPT = Path(__file__).parent / "run.py"


@pytest.mark.timeout(490)
def test_everything_that_needs_a_gpu() -> None:
    if gpu_count() == 0:
        pytest.skip("no GPU here: nothing was checked")
    report = run()
    assert report["passed"], report


@pytest.mark.nightly
@pytest.mark.timeout(400)
def test_the_gpu_script_passes_its_rehearsal_on_cpu() -> None:
    report = run("--device", "cpu")
    assert report["rehearsal"]
    assert report["passed"], report


def test_without_a_gpu_the_script_says_that_nothing_was_checked() -> None:
    if gpu_count() > 0:
        pytest.skip("there is a GPU here")
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stdout.strip() == "no GPU here: nothing was checked"


def run(*arguments: str) -> dict[str, Any]:
    """Run the script, and return its report."""
    done = subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True)
    assert done.stdout, done.stderr
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report
