"""What the benchmarks share: kept-alive torchrun jobs, real Jupyter kernels, and statistics.

Every benchmark compares our side B with a plain side A, and A with a second, identical A, in
the same rounds: identical jobs differ by up to 8 % in a pair, so a ratio means nothing without
its A/A beside it. Progress goes to stderr; the last and only line on stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from jupyter_client.manager import KernelManager

RANKS = 2
HERE = Path(__file__).resolve().parent
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
"""For both sides; torchrun and the extension would choose the same on two cores."""
_PATIENCE_SECONDS = 180.0
_STOP_SECONDS = 10.0


def say(text: str) -> None:
    """Tell how far the benchmark is."""
    print(text, file=sys.stderr, flush=True)


# -- processes


def cpu_seconds(pid: int) -> float:
    """Return the processor time of all threads of a process, to the nanosecond.

    Source: the clock id of a process is ``(~pid << 3) | 2`` (clock_getcpuclockid(3), kernel
    include/linux/posix-timers.h).
    """
    return time.clock_gettime((~pid << 3) | 2)


def tree_cpu_seconds(pid: int) -> float:
    """Return the processor time of a process and of everything alive below it."""
    total = cpu_seconds(pid)
    for child in psutil.Process(pid).children(recursive=True):
        with suppress(OSError):  # it ended meanwhile
            total += cpu_seconds(child.pid)
    return total


class TorchrunJob:
    """A torchrun job of plain PyTorch that stays alive between measurements.

    Its ranks connect to a socket of ours, say something once they are ready, and then answer
    one JSON line with another until the socket closes.

    Args:
        script: what the ranks run; it gets the socket's path as its first argument.
        arguments: further ones.

    Attributes:
        started_at: the monotonic clock just before torchrun was started.
        hellos: what each rank said first.
    """

    def __init__(self, script: str, *arguments: str) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="benchmark-")
        path = str(Path(self._directory.name, "socket"))
        with socket.socket(socket.AF_UNIX) as listener:
            listener.settimeout(_PATIENCE_SECONDS)
            listener.bind(path)
            listener.listen(RANKS)
            self.started_at = time.monotonic()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "torch.distributed.run", "--standalone",
                 f"--nproc-per-node={RANKS}", str(HERE / script), path, *arguments],
                env={**os.environ, **ENVIRONMENT},
                stdout=sys.stderr,
                start_new_session=True,
            )  # fmt: skip
            connections = [listener.accept()[0] for _ in range(RANKS)]
        self._files = [connection.makefile("rw") for connection in connections]
        for connection in connections:
            connection.close()  # the file keeps it open
        self.hellos: list[dict[str, Any]] = [self._read(file) for file in self._files]

    @property
    def pid(self) -> int:
        """The process id of torchrun itself."""
        return self._process.pid

    def ask(self, request: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Send a request to every rank, and return what each answers."""
        for file in self._files:
            file.write(json.dumps(request) + "\n")
            file.flush()
        return [self._read(file) for file in self._files]

    def close(self) -> None:
        """Let the ranks end."""
        for file in self._files:
            file.close()
        try:
            self._process.wait(timeout=_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._directory.cleanup()

    def _read(self, file: Any) -> dict[str, Any]:
        line = file.readline()
        if not line:
            raise RuntimeError(f"a rank of torchrun ended (torchrun: {self._process.poll()})")
        answer: dict[str, Any] = json.loads(line)
        return answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a kernel did with a cell.

    Attributes:
        seconds: from the request until the kernel was idle again, as the front end sees it.
        stdout: what it printed.
        frames: HTML displays and updates.
        html_bytes: the size of the largest of them.
    """

    seconds: float
    stdout: str
    frames: int
    html_bytes: int


class Kernel:
    """An IPython kernel as Jupyter starts it, with this script as its front end."""

    def __init__(self) -> None:
        self._manager = KernelManager(kernel_name="python3")
        # this interpreter, whatever the kernel spec of that name says
        assert self._manager.kernel_spec is not None
        self._manager.kernel_spec.argv[0] = sys.executable
        self._manager.start_kernel(
            env={**os.environ, **ENVIRONMENT}, extra_arguments=["--log-level=ERROR"]
        )
        self._client = self._manager.blocking_client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=_PATIENCE_SECONDS)
        self.run(f"import sys; sys.path.insert(0, {str(HERE)!r})")
        self.pid = int(self.run("import os; print(os.getpid())").stdout)

    def run(self, code: str) -> Answer:
        """Execute a cell.

        Raises:
            RuntimeError: if it failed.
        """
        printed: list[str] = []
        html: list[int] = []

        def hook(message: Mapping[str, Any]) -> None:
            content = message["content"]
            if message["msg_type"] == "stream":
                printed.append(content["text"])
            elif "text/html" in content.get("data", {}):
                html.append(len(content["data"]["text/html"].encode()))

        started = time.monotonic()
        reply = self._client.execute_interactive(
            code, output_hook=hook, timeout=_PATIENCE_SECONDS, allow_stdin=False
        )
        seconds = time.monotonic() - started
        if reply["content"]["status"] != "ok":
            trace = "\n".join(reply["content"].get("traceback", []))
            raise RuntimeError(f"the kernel failed in {code!r}:\n{trace}\n{''.join(printed)}")
        return Answer(
            seconds=seconds,
            stdout="".join(printed),
            frames=len(html),
            html_bytes=max(html, default=0),
        )

    def interrupted(self, code: str, *, after: float) -> float:
        """Execute a cell that does not end, interrupt it, and return the seconds until it ended.

        Args:
            code: the cell.
            after: seconds until the interrupt.

        Raises:
            RuntimeError: if it ended by itself, or not by a KeyboardInterrupt.
        """
        at: list[float] = []

        def press() -> None:
            at.append(time.monotonic())
            self._manager.interrupt_kernel()

        timer = threading.Timer(after, press)
        timer.start()
        reply = self._client.execute_interactive(
            code, output_hook=lambda message: None, timeout=_PATIENCE_SECONDS, allow_stdin=False
        )
        ended = time.monotonic()
        timer.join()
        name = reply["content"].get("ename")
        if not at or "Interrupt" not in str(name):
            raise RuntimeError(f"the cell ended with {name} before it was interrupted")
        return ended - at[0]

    def close(self) -> None:
        """End the kernel; its engines end with it."""
        self._client.stop_channels()
        self._manager.shutdown_kernel()


# -- figures


def rotated(sides: Sequence[str], rounds: int) -> Iterator[tuple[str, ...]]:
    """Yield an order of the sides for each round, so that no side always comes first."""
    for number in range(rounds):
        first = number % len(sides)
        yield (*sides[first:], *sides[:first])


def summary(values: Sequence[float]) -> dict[str, float]:
    """Return the median of values, and the range that holds 95 % of them."""
    ordered = sorted(values)
    return {
        "median": round(statistics.median(ordered), 5),
        "percentile_2_5": round(_percentile(ordered, 0.025), 5),
        "percentile_97_5": round(_percentile(ordered, 0.975), 5),
        "n": len(ordered),
    }


def comparison(
    ours: Sequence[float], plain: Sequence[float], again: Sequence[float], *, bound: float
) -> dict[str, Any]:
    """Compare B with A, and A with A, round by round.

    Returns:
        Both ratios, and whether the median of B/A is within the bound, or within what identical
        jobs differ by (the 97.5th percentile of A/A).
    """
    ab = summary([b / a for b, a in zip(ours, plain, strict=True)])
    aa = summary([b / a for b, a in zip(again, plain, strict=True)])
    allowed = max(bound, aa["percentile_97_5"])
    return {"ab": ab, "aa": aa, "bound": bound, "passes": ab["median"] <= allowed}


def machine() -> dict[str, Any]:
    """Return what the figures depend on."""
    names = ("torch", "ipyparallel", "ipykernel", "ipython", "transformers")
    return {
        "cores": len(os.sched_getaffinity(0)),
        "load_average": os.getloadavg()[0],
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in names},
    }


def measured_from_command(
    measure: Callable[[int, int], dict[str, Any]], doc: str, *, rounds: int, steps: int
) -> int:
    """Measure as the command line says, print the result; return 1 if it misses its bound."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--steps", type=int, default=steps)
    options = parser.parse_args()
    result = measure(options.rounds, options.steps)
    print(json.dumps(result))
    return 0 if result["passes"] else 1


def _percentile(ordered: Sequence[float], part: float) -> float:
    """Return a percentile, with a straight line between neighbours."""
    place = part * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)
