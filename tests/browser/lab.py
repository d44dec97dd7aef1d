"""A real JupyterLab on loopback, looked at by a real Chromium.

The server has a home, settings and runtime files of its own, in a temporary directory, and no
token; everything it starts carries the mark of the test run in its environment. The page is
driven through JupyterLab's own commands, as its menus and keys do.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

Theme = Literal["JupyterLab Light", "JupyterLab Dark"]

APT_LINE = "apt-get install --no-install-recommends chromium fonts-dejavu-core"
_START_SECONDS, _STOP_SECONDS = 40.0, 15.0
_OFFER = ".jp-Completer:not(.jp-mod-outofview):not(.lm-mod-hidden) .jp-Completer-item"
_OFFER_SECONDS, _PRESSED_AGAIN_SECONDS = 8.0, 2.5
_MILLISECONDS = 1000
_CHROMIUM = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-dev-shm-usage"),
    *("--no-first-run", "--disable-sync", "--disable-breakpad"),
    *("--disable-background-networking", "--disable-component-update"),
)
_SETTINGS: dict[str, dict[str, Any]] = {
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
    # every cell is in the page, also one that is scrolled out of sight
    "notebook-extension/tracker": {"windowingMode": "none"},
}
_WIDGET = "jupyterapp.shell.currentWidget"
_KERNEL_STATUS = f"{_WIDGET}.sessionContext.session?.kernel?.status"


def missing() -> str:
    """Return what is needed and not here, with what to type; empty if all is here."""
    for module in ("playwright", "jupyterlab"):
        try:
            __import__(module)
        except ImportError:
            return f"the browser tests need {module}: pip install '.[test]'"
    if _chromium() is None:
        return f"the browser tests need Chromium: {APT_LINE}"
    return ""


def _chromium() -> str | None:
    names = ("chromium", "chromium-browser", "google-chrome")
    return next((path for name in names if (path := shutil.which(name))), None)


# ---------------------------------------------------------------- server


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A running JupyterLab: where it listens, and the directory of its notebooks."""

    url: str
    root: Path


@contextmanager
def jupyterlab(directory: Path) -> Iterator[Server]:
    """Run a JupyterLab with everything it reads and writes under a directory."""
    root = directory / "notebooks"
    root.mkdir(parents=True)
    for name, values in _SETTINGS.items():
        file = directory / "settings" / "@jupyterlab" / f"{name}.jupyterlab-settings"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(values))
    port, log = _free_port(), directory / "lab.log"
    with log.open("w") as stream:
        process = subprocess.Popen(
            _command(port, root),
            env=_environment(directory),
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_for(f"{url}/api", process, log)
        yield Server(url=url, root=root)
    finally:
        process.terminate()
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _command(port: int, root: Path) -> list[str]:
    options = ("--no-browser", "--allow-root", "--expose-app-in-browser", "--LabApp.news_url=")
    place = (f"--ServerApp.root_dir={root}", "--ip=127.0.0.1", f"--port={port}")
    access = ("--ServerApp.port_retries=0", "--IdentityProvider.token=")
    return [sys.executable, "-m", "jupyterlab", *options, *place, *access]


def _environment(directory: Path) -> dict[str, str]:
    """Return the environment of the server: ours, but no file of the person's is seen."""
    places = {
        "HOME": "home",
        "JUPYTER_CONFIG_DIR": "config",
        "JUPYTER_DATA_DIR": "data",
        "JUPYTER_RUNTIME_DIR": "runtime",
        "IPYTHONDIR": "ipython",
        "JUPYTERLAB_SETTINGS_DIR": "settings",
        "JUPYTERLAB_WORKSPACES_DIR": "workspaces",
    }
    for name in places.values():
        (directory / name).mkdir(exist_ok=True)
    return os.environ | {name: str(directory / place) for name, place in places.items()}


def _free_port() -> int:
    """Return a port that nobody listens at, none that the system gives to others meanwhile."""
    while True:
        port = random.randrange(20_000, 32_000)  # Linux gives from 32,768 on
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def _wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        try:
            with urllib.request.urlopen(url, timeout=1) as answer:
                answer.read()
            return
        except OSError:
            time.sleep(0.1)
    raise RuntimeError(f"JupyterLab did not start:\n{log.read_text()[-3000:]}")


# ---------------------------------------------------------------- page


@contextmanager
def chromium(directory: Path, *, width: int = 1280, height: int = 1000) -> Iterator[Page]:
    """Open a page of a Chromium whose profile is under a directory."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        context = playwright.chromium.launch_persistent_context(
            str(directory / "chromium"),
            executable_path=_chromium(),
            headless=True,
            args=list(_CHROMIUM),
            env=dict(_environment(directory)),
            viewport={"width": width, "height": height},
        )
        try:
            yield context.pages[0]
        finally:
            context.close()


class Notebook:
    """A notebook that is open in a page.

    Args:
        page: of the browser.
        server: which has the notebook.
        name: file name.
    """

    def __init__(self, page: Page, server: Server, name: str) -> None:
        self.page = page
        self.path = server.root / name
        page.goto(f"{server.url}/doc/tree/{name}?reset")
        page.wait_for_selector(".jp-NotebookPanel .jp-Cell", timeout=40 * _MILLISECONDS)

    def command(self, name: str, **options: Any) -> None:
        """Run one of JupyterLab's commands; what it starts goes on."""
        self.page.evaluate(
            "([name, options]) => { jupyterapp.commands.execute(name, options) }", [name, options]
        )

    def settle(self, name: str, **options: Any) -> None:
        """Run one of JupyterLab's commands and wait for its end."""
        self.page.evaluate(
            "async ([name, options]) => { await jupyterapp.commands.execute(name, options) }",
            [name, options],
        )

    @property
    def kernel_status(self) -> str | None:
        """``idle``, ``busy``, …; None without a kernel."""
        status: str | None = self.page.evaluate(f"{_KERNEL_STATUS} ?? null")
        return status

    def wait_for_kernel(self) -> None:
        """Wait until a kernel is there and idle."""
        self._wait(f"{_WIDGET}?.sessionContext?.isReady && {_KERNEL_STATUS} === 'idle'", 40)

    def wait_until_idle(self, seconds: float = 60) -> None:
        """Wait until no cell runs or is queued."""
        prompts = "[...document.querySelectorAll('.jp-InputPrompt')]"
        busy = f"{prompts}.some(prompt => prompt.textContent.includes('*'))"
        self._wait(f"{_KERNEL_STATUS} === 'idle' && !{busy}", seconds)

    def _wait(self, condition: str, seconds: float) -> None:
        self.page.wait_for_function(condition, timeout=seconds * _MILLISECONDS)

    def run_cell(self, index: int) -> None:
        """Run one cell and wait for its end."""
        self.start_cell(index)
        self.page.wait_for_timeout(100)
        self.wait_until_idle()

    def start_cell(self, index: int) -> None:
        """Run one cell; it goes on."""
        self.page.evaluate(f"{_WIDGET}.content.activeCellIndex = {index}")
        self.command("notebook:run-cell")

    def wait_for_output(self, index: int, pattern: str, seconds: float = 60) -> None:
        """Wait until the text under a cell matches a regular expression."""
        self.page.wait_for_function(
            "([index, pattern]) => new RegExp(pattern).test("
            "document.querySelectorAll('.jp-Notebook .jp-Cell')[index].innerText)",
            arg=[index, pattern],
            timeout=seconds * _MILLISECONDS,
        )

    def reload(self) -> None:
        """Load the page anew, as a person does whose page seems to stand still."""
        self.page.reload()
        self.page.wait_for_selector(".jp-NotebookPanel .jp-Cell", timeout=40 * _MILLISECONDS)
        self._wait(f"{_WIDGET}?.sessionContext?.isReady", 40)

    def completions(self, index: int, typed: str) -> list[str]:
        """Type into an empty cell, press Tab, and return what the page offers.

        On a machine that is busy otherwise the engines' answer may come too late; then Tab is
        pressed again, as a person would.
        """
        self.page.evaluate(f"{_WIDGET}.content.activeCellIndex = {index}")
        self.settle("notebook:enter-edit-mode")
        self.page.keyboard.type(typed)
        items = self.page.locator(f"{_OFFER} .jp-Completer-match")
        deadline = time.monotonic() + _OFFER_SECONDS
        pressed = 0.0
        while not items.count() and (now := time.monotonic()) < deadline:
            if now - pressed > _PRESSED_AGAIN_SECONDS:
                self.page.keyboard.press("Tab")
                pressed = now
            self.page.wait_for_timeout(100)
        return items.all_inner_texts()

    def clear(self) -> None:
        """Close what the page offers, and empty the active cell."""
        self.page.keyboard.press("Escape")
        self.page.wait_for_selector(_OFFER, state="detached")
        self.page.evaluate(f"{_WIDGET}.content.activeCell.model.sharedModel.setSource('')")

    def cell(self, index: int) -> Locator:
        """Return a cell."""
        return self.page.locator(".jp-Notebook .jp-Cell").nth(index)

    def prompt(self, index: int) -> str:
        """Return the prompt of a cell: ``[3]:``, ``[*]:``, ``[ ]:``."""
        return self.cell(index).locator(".jp-InputPrompt").inner_text().strip()

    def output(self, index: int) -> str:
        """Return the text under a cell, as it is seen."""
        return self.cell(index).locator(".jp-Cell-outputWrapper").inner_text()

    def use_theme(self, theme: Theme) -> None:
        """Change the theme of the page."""
        self.settle("apputils:change-theme", theme=theme)
        light = "true" if theme == "JupyterLab Light" else "false"
        self.page.wait_for_selector(f'body[data-jp-theme-light="{light}"]', state="attached")
        self.page.wait_for_timeout(300)  # the theme's style sheet is drawn


def write_notebook(path: Path, sources: Sequence[str]) -> None:
    """Write a notebook of code cells."""
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    cells = [
        {
            "cell_type": "code",
            "id": f"cell-{index:02d}",
            "metadata": {},
            "execution_count": None,
            "outputs": [],
            "source": source,
        }
        for index, source in enumerate(sources)
    ]
    notebook = {
        "cells": cells,
        "metadata": {"kernelspec": kernel},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    path.write_text(json.dumps(notebook))
