"""How the end of an engine is told."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import pytest

from fsdp_magic.notebook import deaths
from fsdp_magic.notebook.deaths import Death, Deaths, died, last_words

OWN = (
    "2026-01-02 03:04:05.678 [EngineApplication.0] Completed registration with id 0\n"
    "<StreamHandler <stderr> (INFO)>\n"
)
CRASH = """Fatal Python error: Aborted

Thread 0x00007f (most recent call first):
  File "/lib/threading.py", line 327 in wait
free(): double free detected
Current thread 0x00007e (most recent call first):
  File "/lib/ctypes/__init__.py", line 519 in string_at
  File "<%%fsdp [3]>", line 2 in <module>
  File "/site/fsdp_magic/engine/cells.py", line 73 in run

Extension modules: zmq (total: 1)
"""


def test_a_log_that_says_nothing_is_left_out() -> None:
    assert last_words(OWN) == ()


def test_the_last_lines_are_told_without_what_could_steer_a_terminal() -> None:
    log = OWN + "\n".join(f"line {n}\x1b[31m" for n in range(9)) + "\n\n"
    assert last_words(log) == ("line 4", "line 5", "line 6", "line 7", "line 8")


def test_a_crash_is_told_with_the_frames_of_the_thread_that_crashed() -> None:
    assert last_words(OWN + CRASH) == (
        "free(): double free detected",
        "Fatal Python error: Aborted",
        '  File "/lib/ctypes/__init__.py", line 519 in string_at',
        '  File "<%%fsdp [3]>", line 2 in <module>',
    )


def test_a_crash_of_a_thread_of_c_code_is_told_with_the_line_of_the_cell() -> None:
    crash = CRASH.replace("Current thread", "Thread").replace("free(): double free detected\n", "")
    assert last_words(crash) == (
        "Fatal Python error: Aborted",
        '  File "<%%fsdp [3]>", line 2 in <module>',
    )


def test_several_deaths_are_told_in_one_line() -> None:
    error = died(
        {3: Death(code=-9), 1: Death(code=-9, memory_ran_out=True), 2: Death(code=-9)},
        world_size=4,
    )
    host = socket.gethostname()
    assert str(error) == (
        f"rank 1 on {host} ended (SIGKILL: killed by the system, because memory ran out), "
        f"ranks 2-3 on {host} ended (SIGKILL); type %fsdp_restart, which replaces them; the other "
        "keeps its variables"
    )
    assert (error.rank, error.signal) == (1, signal.SIGKILL)


@pytest.mark.parametrize(
    ("code", "how"),
    [(3, "exit code 3"), (-11, "SIGSEGV"), (-40, "signal 40"), (None, "nobody can say how")],
)
def test_every_end_has_a_name(code: int | None, how: str) -> None:
    assert Death(code=code).how == how


def test_what_c_code_wrote_last_is_read_from_its_pipe() -> None:
    read, write = os.pipe()
    stderr = os.dup(2)
    try:
        os.dup2(write, 2)
        ends = Deaths()
        ends.expect(7, os.getpid())
        os.write(2, b"terminate called\n")
    finally:
        os.dup2(stderr, 2)
        for descriptor in (read, write, stderr):
            os.close(descriptor)
    before = len(os.listdir("/proc/self/fd"))
    ends.note(7, -6, "")
    assert ends[7].log == ("terminate called",)
    assert len(os.listdir("/proc/self/fd")) == before - 1


@pytest.mark.parametrize("file", ["oom_kill 3\nmax 1", "under_oom 0\noom_kill 3"])
def test_the_systems_killer_is_recognised(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = tmp_path / "memory.events"
    events.write_text(file)
    monkeypatch.setattr(deaths, "_oom_files", lambda: [tmp_path / "none", events])
    ends = Deaths()
    ends.note(0, -9, "")
    events.write_text(file.replace("3", "4"))
    ends.note(1, -9, "")
    ends.note(2, -9, "")
    assert [ends[number].memory_ran_out for number in range(3)] == [False, True, False]
