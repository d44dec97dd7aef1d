"""Everything that needs a GPU, on one NVIDIA GPU, in under 8 minutes.

    python tests/gpu/run.py

prints one JSON report, last on stdout: the card, the versions, and every check with its figures.
It ends with 1 if a check failed. Without a GPU nothing is checked and it says so. ``--device
cpu`` is a rehearsal on CPU engines, which tests this script and nothing about GPUs: the memory
limit stands for the card's cap, gloo for NCCL, and what only a card has is left out.

This process stands for the notebook's kernel: it must never initialise CUDA, so the reference
loop runs on its CPU. The last check touches CUDA here on purpose.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "engines"))
import equality
from card import card, nvml_used_bytes, processes_on_gpus
from engine_cells import (
    BALLAST,
    BATCHNORM,
    COMPARE_TRANSPORTS,
    HOG,
    MEDIUM,
    MEDIUM_CELL,
    SILENT_CELL,
    WHERE_THINGS_ARE,
)
from tuning import SETTING, tuned

from fsdp_magic.errors import OutOfMemoryOnRankError, UsageError
from fsdp_magic.notebook import world
from fsdp_magic.notebook.devices import gpu_count
from fsdp_magic.notebook.session import Session
from fsdp_magic.notebook.sessions import init as start

NO_GPU = "no GPU here: nothing was checked"
_REHEARSAL = "on CPU engines: nothing about a GPU was checked"
_LIMIT_SECONDS = 470
_TOLERANCE = 1e-9
_BATCHNORM_TOLERANCE = 1e-6
"""SyncBatchNorm keeps its statistics in float32."""
_TRANSPORT_BOUND = 1.05
_NVML_TOLERANCE = 0.03
_CASES = {
    "plain, SGD": equality.Case(model=equality.PLAIN, cell=equality.PLAIN_CELL),
    "GPT-2, SGD": equality.Case(),
    "plain, AdamW": equality.Case(
        model=equality.PLAIN, cell=equality.PLAIN_CELL, optimizer=equality.ADAMW, lr=1e-2
    ),
    "GPT-2, clipped": equality.Case(max_grad_norm=0.3),
}
Figures = dict[str, Any]


@dataclass(kw_only=True)
class Report:
    """What was found.

    Attributes:
        device: ``cuda``, or ``cpu`` in a rehearsal.
        checks: by name: whether it passed, its figures or what failed.
    """

    device: str
    checks: dict[str, Figures] = field(default_factory=dict)

    @property
    def on_gpu(self) -> bool:
        """Whether there is a card to check."""
        return self.device == "cuda"

    @property
    def passed(self) -> bool:
        """Whether every check passed."""
        return all(check["passed"] for check in self.checks.values())

    def check(self, name: str, look: Callable[[], Figures]) -> None:
        """Run a check; a failure is noted, and the next one runs."""
        started = time.monotonic()
        try:
            result: Figures = {"passed": True, **look()}
        except Exception as error:  # whatever went wrong is the finding
            traceback.print_exc()
            result = {"passed": False, "error": f"{type(error).__name__}: {error}"}
        self.checks[name] = {**result, "seconds": round(time.monotonic() - started, 1)}
        word = "FAILED" if not result["passed"] else "passed" if self.on_gpu else "rehearsed"
        print(f"{word}: {name} ({self.checks[name]['seconds']} s)", file=sys.stderr, flush=True)

    @contextmanager
    def session(self, name: str, **options: Any) -> Iterator[Session | None]:
        """Yield a session; None if its engines do not start, which is noted."""
        started: list[Session] = []

        def look() -> Figures:
            started.append(start(show=False, restart=True, **options))
            return {"world_size": started[0].world_size}

        self.check(name, look)
        try:
            yield started[0] if started else None
        finally:
            for session in started:
                session.shutdown()


# -- checks


def too_many_engines(report: Report) -> Figures:
    """More engines than GPUs, without --share-gpus, is an error with both numbers."""
    gpus = gpu_count() if report.on_gpu else 1
    with patch.object(world, "gpu_count", lambda: gpus):
        try:
            start(n=gpus + 2, device="cuda", show=False).shutdown()
        except UsageError as error:
            message = str(error)
        else:
            raise AssertionError("engines started")
    assert str(gpus) in message, message
    assert str(gpus + 2) in message, message
    return {"message": message}


def equal_to_one_process(session: Session, *, on_gpu: bool) -> Figures:
    """Losses, gradient norms and weights are those of the plain loop on the CPU."""
    # tests/engines shows it on CPU engines; a rehearsal needs one case
    cases = _CASES if on_gpu else {"plain, SGD": _CASES["plain, SGD"]}
    for case in cases.values():
        accumulate = 2 if session.world_size == 1 else 1
        measured = equality.on_engines(session, case, accumulate=accumulate)
        equality.assert_equal(measured, equality.single_process(case), tolerance=_TOLERANCE)
    return {"cases": list(cases), "tolerance": _TOLERANCE}


def offloaded_equals_one_process(session: Session, *, on_gpu: bool) -> Figures:
    """With --cpu-offload too, clipping included; shards and their state are on the host (F17)."""
    case = _CASES["GPT-2, clipped"]
    accumulate = 2 if session.world_size == 1 else 1
    measured = equality.on_engines(session, case, accumulate=accumulate, cpu_offload=True)
    equality.assert_equal(measured, equality.single_process(case), tolerance=_TOLERANCE)
    kinds = session.pull(WHERE_THINGS_ARE)
    session.run("del logits", show=False)  # their graph would keep the model
    assert kinds == {"parameters": ["cpu"], "state": ["cpu"]}, kinds
    figures: Figures = {"where": kinds, "tolerance": _TOLERANCE}
    memory = session.runs[-1].ranks[0].memory
    assert memory is not None
    if on_gpu:
        assert memory.parameter_bytes == memory.optimizer_bytes == 0, memory
    return {**figures, "parameter_bytes_on_device": memory.parameter_bytes}


def synchronized_batchnorm(session: Session) -> Figures:
    """BatchNorm over the micro-batches of all ranks is that of the global batch."""
    case = equality.Case(model=BATCHNORM, cell=equality.PLAIN_CELL)
    measured = equality.on_engines(session, case, sync_batchnorm=True)
    equality.assert_equal(measured, equality.single_process(case), tolerance=_BATCHNORM_TOLERANCE)
    return {"tolerance": _BATCHNORM_TOLERANCE}


def no_host_synchronization(session: Session, *, on_gpu: bool) -> Figures:
    """No step after the first ones makes the host wait for the device."""
    session.model(equality.Case(
        model=equality.PLAIN, optimizer=equality.ADAMW, lr=1e-3, dtype="float32"
    ).built, show=False)  # fmt: skip
    cell = SILENT_CELL if on_gpu else SILENT_CELL.replace("torch.cuda.set_sync_debug_mode", "str")
    try:
        run = session.train(
            cell, data="data", steps=20, micro_batch_size=4, accumulate=2, max_grad_norm=1.0,
            show=False,
        )  # fmt: skip
    finally:
        if on_gpu:
            session.run("import torch; torch.cuda.set_sync_debug_mode('default')", show=False)
    assert run.steps == 20
    return {"steps": run.steps, "mode": "error" if on_gpu else "not there in a rehearsal"}


def gauges(session: Session, *, on_gpu: bool) -> Figures:
    """Used memory is the driver's; the parts add up to it; parameters have their size."""
    session.model(MEDIUM, show=False)
    run = session.train(MEDIUM_CELL, steps=10, show=False)
    memory = run.ranks[0].memory
    assert memory is not None
    parts = {
        "parameters": memory.parameter_bytes,
        "gradients": memory.gradient_bytes,
        "optimizer": memory.optimizer_bytes,
        "activations": memory.activation_bytes,
        "cache": memory.cache_bytes,
        "other": memory.other_bytes,
    }
    assert sum(parts.values()) == memory.used_bytes, (parts, memory)
    size = session.pull("sum(p.numel() * p.element_size() for p in model.parameters())")
    assert memory.parameter_bytes == size, (memory.parameter_bytes, size)
    assert abs(memory.optimizer_bytes - 2 * size) <= 0.01 * size, (memory.optimizer_bytes, size)
    assert run.peak_bytes[0] is not None
    assert run.peak_bytes[0] >= 4 * size  # weights, gradients and two moments at once
    figures: Figures = {"parts": parts, "used_bytes": memory.used_bytes}
    if not on_gpu:
        return figures
    session.run(BALLAST, show=False)
    ours, theirs = session.status(show=False)[0].used_bytes, nvml_used_bytes(session)
    figures |= {"status_used_bytes": ours, "nvml_used_bytes": theirs}
    assert abs(ours - theirs) <= _NVML_TOLERANCE * theirs, figures
    return figures


def transports(session: Session, *, on_gpu: bool) -> Figures:
    """A step over our group costs what it costs over a plain group of the same transport."""
    backend, rounds = ("nccl", 30) if on_gpu else ("gloo", 3)
    cell = COMPARE_TRANSPORTS.replace("BACKEND", backend).replace("ROUNDS", str(rounds))
    session.run(cell, show=False)
    figures: Figures = session.pull("compared")
    if on_gpu:  # in a rehearsal other processes take the same cores
        step = figures["step"]
        assert step["ratio"] <= max(_TRANSPORT_BOUND, step["plain_again_97_5"]), figures
    return {"backend": backend, **figures}


def memory_cap(session: Session) -> Figures:
    """A rank that asks for more than its share runs out of memory, and can go on with less."""
    rank = session.status(show=False)[1]
    capacity = rank.memory.capacity_bytes
    assert capacity is not None
    try:
        session.run(HOG.format(size=int(1.1 * capacity)), ranks="1", show=False)
    except OutOfMemoryOnRankError as error:
        message = str(error)
    else:
        raise AssertionError(f"1.1 x {capacity} bytes were there")
    session.run(HOG.format(size=int(0.3 * capacity)) + "\ndel hog", show=False)
    after = session.status(show=False)[1]
    assert after.allocated_bytes <= rank.allocated_bytes + 0.05 * capacity, (rank, after)
    return {"capacity_bytes": capacity, "error": message.splitlines()[0]}


def kernel_untouched() -> Figures:
    """This process has not initialised CUDA, and the driver does not list it."""
    assert not torch.cuda.is_initialized()
    listed = processes_on_gpus()
    assert os.getpid() not in listed
    return {"processes_listed_by_nvml": len(listed)}


def kernel_touched(report: Report) -> Figures:
    """Engines work although this process has a CUDA context (last, because it stays)."""
    if report.on_gpu:
        torch.zeros(1, device="cuda")
    with start(n=1, device=report.device, restart=True, show=False) as session:
        case = _CASES["plain, SGD"]
        equality.assert_equal(
            equality.on_engines(session, case), equality.single_process(case), tolerance=_TOLERANCE
        )
    return {"cuda_initialised_in_kernel": torch.cuda.is_initialized()}


# -- all of them


def run_all(report: Report) -> None:
    """Run every check."""
    gpu = report.on_gpu
    share: Figures = {"share_gpus": True} if gpu else {"memory_limit": "512MiB"}
    report.check("more engines than GPUs", lambda: too_many_engines(report))
    with report.session("one rank starts", n=1, device=report.device) as one:
        if one is not None:
            report.check("one rank equals CPU", lambda: equal_to_one_process(one, on_gpu=gpu))
            report.check("one rank offloads", lambda: offloaded_equals_one_process(one, on_gpu=gpu))
            report.check("no sync in a step", lambda: no_host_synchronization(one, on_gpu=gpu))
            report.check("gauges", lambda: gauges(one, on_gpu=gpu))
            report.check("our group against plain", lambda: transports(one, on_gpu=gpu))
    with report.session("two ranks share", n=2, device=report.device, **share) as two:
        if two is not None:
            report.check("two ranks equal CPU", lambda: equal_to_one_process(two, on_gpu=gpu))
            report.check("two ranks offload", lambda: offloaded_equals_one_process(two, on_gpu=gpu))
            if gpu:
                report.check("BatchNorm over ranks", lambda: synchronized_batchnorm(two))
            report.check("memory cap", lambda: memory_cap(two))
    report.check("tuned size", lambda: tuned(report.device, ""))
    if gpu:
        report.check("tuned size, unfragmented", lambda: tuned(report.device, SETTING))
    report.check("kernel never initialised CUDA", kernel_untouched)
    report.check("kernel with a CUDA context", lambda: kernel_touched(report))


def main() -> int:
    """Run the checks, print the report, and return 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help=argparse.SUPPRESS)
    device: str = parser.parse_args().device
    if device == "cuda" and gpu_count() == 0:
        print(NO_GPU)
        return 0
    faulthandler.dump_traceback_later(_LIMIT_SECONDS, exit=True)
    started, report = time.monotonic(), Report(device=device)
    on = card()
    run_all(report)
    print(json.dumps({
        **({} if device == "cuda" else {"rehearsal": _REHEARSAL}),
        "passed": report.passed,
        "seconds": round(time.monotonic() - started, 1),
        "on": on,
        "checks": report.checks,
    }))  # fmt: skip
    return 0 if report.passed else 1


if __name__ == "__main__":
    sys.exit(main())
