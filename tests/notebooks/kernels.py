"""A real kernel, driven as a notebook drives it: cells, interrupts, Tab; async, so nothing is left.

Also used by ``tests/compatibility``, under other versions of IPython, ipykernel and nbclient.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from jupyter_client import AsyncKernelManager

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
QUIET = {"CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "default"}


@dataclass
class Shown:
    """What a cell showed: all text, the newest HTML of each display, and its error."""

    status: str = ""
    text: str = ""
    html: list[str] = field(default_factory=list)
    error: str | None = None
    traceback: str = ""


class Kernel:
    """A kernel and its client."""

    def __init__(self, manager: AsyncKernelManager, client: Any) -> None:
        self._manager = manager
        self._client = client

    @property
    def pid(self) -> int:
        return int(self._manager.provisioner.pid)  # type: ignore[union-attr]

    async def run(self, cell: str, *, seconds: float = 20) -> Shown:
        """Run a cell and return what it showed, when it has ended."""
        return await self.shown(self.submit(cell), seconds=seconds)

    def submit(self, cell: str) -> str:
        """Send a cell, and return its message's id."""
        return str(self._client.execute(cell, store_history=True, stop_on_error=True))

    async def shown(self, request: str, *, seconds: float = 20) -> Shown:
        """Wait for a cell, the oldest that was sent; return what it showed."""
        shown, displays = Shown(), {}
        async with asyncio.timeout(seconds):
            while True:
                message = await self._client.get_iopub_msg()
                if message["parent_header"].get("msg_id") != request:
                    continue
                content = message["content"]
                if message["msg_type"] == "status" and content["execution_state"] == "idle":
                    break
                _take(message["msg_type"], content, shown, displays)
            while (reply := await self._client.get_shell_msg())["parent_header"][
                "msg_id"
            ] != request:
                continue
        shown.status = reply["content"]["status"]
        shown.html = list(displays.values())
        return shown

    async def complete(self, cell: str) -> list[str]:
        """Return what Tab offers at the end of a cell."""
        request = self._client.complete(cell)
        while (reply := await self._client.get_shell_msg())["parent_header"]["msg_id"] != request:
            continue
        return list(reply["content"]["matches"])

    async def interrupt(self) -> None:
        await self._manager.interrupt_kernel()


def _take(kind: str, content: Any, shown: Shown, displays: dict[str, str]) -> None:
    if kind == "stream":
        shown.text += content["text"]
    elif kind == "error":
        shown.error = f"{content['ename']}: {content['evalue']}"
        shown.traceback = _COLOURS.sub("", "\n".join(content["traceback"]))
    elif kind in ("display_data", "update_display_data", "execute_result"):
        data = content["data"]
        if kind != "update_display_data":
            shown.text += data.get("text/plain", "")
        if "text/html" in data:
            key = content.get("transient", {}).get("display_id", str(len(displays)))
            displays[key] = data["text/html"]


@asynccontextmanager
async def kernel(directory: str, **environment: str) -> AsyncIterator[Kernel]:
    """Start a kernel of this interpreter in a directory, and end it afterwards."""
    manager = AsyncKernelManager(kernel_name="python3")
    manager.kernel_spec.argv[0] = sys.executable  # type: ignore[union-attr]
    places = {"HOME": directory, "IPYTHONDIR": directory}
    await manager.start_kernel(env=os.environ | QUIET | places | environment, cwd=directory)
    client = manager.client()
    client.start_channels()
    try:
        await client.wait_for_ready(timeout=60)
        yield Kernel(manager, client)
    finally:
        client.stop_channels()
        await manager.shutdown_kernel()
        manager.context.destroy(linger=0)
