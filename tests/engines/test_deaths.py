"""An engine that dies is named at once, in any phase, and nobody waits for it."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psutil
import pytest

from fsdp_magic.errors import CellFailedError, EngineDiedError
from fsdp_magic.notebook.session import Session

MODEL = """
import os, time, torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))

def die(now):
    if rank == 1 and now: os.kill(os.getpid(), 9)

class Data(torch.utils.data.Dataset):
    def __init__(self, dies_at=None): self.dies_at = dies_at
    def __len__(self): return 64
    def __getitem__(self, i):
        die(i == self.dies_at)
        return torch.full((4,), i / 64)

class DiesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x.clone()
    @staticmethod
    def backward(ctx, gradient):
        die(step == 2)
        return gradient

class DyingSGD(torch.optim.SGD):
    def step(self, closure=None):
        die(step == 2)
        return super().step(closure)

optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = torch.utils.data.DataLoader(Data(), batch_size=4, num_workers=2)
"""
LOSS = "loss = model(batch).square().mean()"
SLOW = f"time.sleep(0.05)\n{LOSS}"


def build(session: Session, *, optimizer: str = "torch.optim.SGD") -> None:
    session.model(MODEL.replace("= torch.optim.SGD(model", f"= {optimizer}(model"), show=False)


@contextmanager
def told_within(seconds: float) -> Iterator[list[EngineDiedError]]:
    """Expect an engine's death inside, and its error soon after the end of it."""
    caught: list[EngineDiedError] = []
    with pytest.raises(EngineDiedError) as raised:
        yield caught
    gone = time.time()
    caught.append(raised.value)
    assert gone - ended_at() < seconds


_KILLED = [0.0]


def ended_at() -> float:
    """Return when ``kill_later`` killed; a death by the engine's own hand took no time."""
    return _KILLED[0] or time.time()


def kill_later(after: float, *pids: int, stop_first: bool = False) -> threading.Timer:
    """Kill processes after a time."""

    def kill() -> None:
        for pid in pids if stop_first else ():
            os.kill(pid, signal.SIGSTOP)
        if stop_first:
            time.sleep(0.2)
        _KILLED[0] = time.time()
        for pid in pids:
            os.kill(pid, signal.SIGKILL)

    timer = threading.Timer(after, kill)
    timer.start()
    return timer


@pytest.fixture(autouse=True)
def no_kill_yet() -> None:
    _KILLED[0] = 0.0


def workers(pid: int) -> list[int]:
    """Return the workers of an engine's DataLoader."""
    try:
        children = psutil.Process(pid).children()
        return [child.pid for child in children if "watcher" not in child.name()]
    except psutil.NoSuchProcess:
        return []


def gone(pids: list[int], *, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while any(map(_lives, pids)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def _lives(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


# ---------------------------------------------------------------- in every phase

PHASES: dict[str, tuple[str, str, str]] = {
    "data": (LOSS, "Data(dies_at=20)", "torch.optim.SGD"),
    "forward": (f"die(step == 2)\n{LOSS}", "Data()", "torch.optim.SGD"),
    "backward": (
        "loss = DiesInBackward.apply(model(batch)).square().mean()",
        "Data()",
        "torch.optim.SGD",
    ),
    "optimizer": (LOSS, "Data()", "DyingSGD"),
}


@pytest.mark.parametrize("phase", PHASES)
def test_f6_a_death_in_a_run_is_told_at_once_in_every_phase(session: Session, phase: str) -> None:
    cell, data, optimizer = PHASES[phase]
    build(session, optimizer=optimizer)
    started = time.monotonic()
    with pytest.raises(EngineDiedError) as caught:
        session.train(cell, data=data, no_shuffle=True, micro_batch_size=4, show=False)
    assert time.monotonic() - started < 10.0
    died = caught.value
    assert (died.rank, died.signal, died.host) == (1, signal.SIGKILL, os.uname().nodename)
    assert died.run is session.runs[-1]
    assert died.run.state == "failed"


def test_a_death_while_output_pours_in_is_told_at_once(session: Session) -> None:
    code = """
import os
for line in range(200_000):
    print("x" * 50)
    if rank == 1 and line == 3_000: os.kill(os.getpid(), 9)
"""
    started = time.monotonic()
    with pytest.raises(EngineDiedError, match="rank 1"):
        session.run(code, show=False)
    assert time.monotonic() - started < 10.0


def test_a_stopped_engine_that_is_killed_is_told_at_once(session: Session) -> None:
    build(session)
    pid = session.status(show=False)[0].pid
    timer = kill_later(0.3, pid, stop_first=True)
    with told_within(4.0):
        session.train(SLOW, data="Data()", epochs=50, show=False)
    timer.join()


# ---------------------------------------------------------------- what it says

LAST_WORDS = {
    "an exit": ("os.write(2, b'why \\x1b[31mred\\xff\\n'); os._exit(3)", "exit code 3", "why red"),
    "a crash": ("ctypes.string_at(0)", "SIGSEGV", '"<%%fsdp'),
    "a kill": ("os.kill(os.getpid(), 9)", "SIGKILL", ""),
}


@pytest.mark.parametrize("end", LAST_WORDS)
def test_the_last_words_of_an_engine_are_shown(session: Session, end: str) -> None:
    code, how, words = LAST_WORDS[end]
    code = f"import ctypes, os\nif rank == 1: {code}"
    with pytest.raises(EngineDiedError) as caught:
        session.run(code, show=False)
    first, *lines = str(caught.value).splitlines()
    assert first.startswith(f"rank 1 on {os.uname().nodename} ended ({how}); type %fsdp_restart")
    assert "\x1b" not in str(caught.value)
    if words:
        assert lines[0] == "the last lines of the log of rank 1:"
        assert words in "\n".join(lines)
        assert len(lines) < 12
    else:
        assert not lines


# ---------------------------------------------------------------- workers of a DataLoader


def later(find: Callable[[], list[int]], *, count: int) -> list[int]:
    """Wait in another thread's time until so many are found."""
    deadline = time.monotonic() + 5
    while len(found := find()) < count and time.monotonic() < deadline:
        time.sleep(0.02)
    return found


def test_f40_an_engine_that_dies_with_workers_frees_its_peers_and_takes_them_along(
    session: Session,
) -> None:
    build(session)
    first, second = (status.pid for status in session.status(show=False))
    seen: list[int] = []

    def kill() -> None:
        seen.extend(later(lambda: workers(first) + workers(second), count=4))
        time.sleep(0.1)
        kill_later(0.0, second).join()

    thread = threading.Thread(target=kill)
    thread.start()
    with told_within(4.0):
        session.train(SLOW, data="loader", epochs=50, show=False)
    thread.join()
    assert len(seen) == 4
    assert gone(seen, seconds=1.0), "those of the rank that lives end with their run"


def test_a_killed_worker_fails_the_step_and_nothing_else(session: Session) -> None:
    build(session)
    before = session.pull("model[0].weight.full_tensor().tolist()")
    pid = session.status(show=False)[1].pid

    def kill() -> None:
        os.kill(later(lambda: workers(pid), count=2)[0], signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    killed = r"is killed by signal: Killed|exited unexpectedly"  # before torch knew its workers
    with pytest.raises(CellFailedError, match=killed) as caught:
        session.train(SLOW, data="loader", epochs=50, show=False)
    thread.join()
    assert caught.value.ranks == (1,)
    assert "fewer workers" in str(caught.value)
    done = caught.value.run.steps
    assert session.train(LOSS, data="loader", steps=2, show=False).first_step == done
    assert session.pull("model[0].weight.full_tensor().tolist()") != before
