"""What a watcher ends, and what it leaves to the other watchers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from fsdp_magic.engine import watcher

TREE = """
import os, sys, time
for name in ("ordinary", "fsdp watcher"):
    child = os.fork()
    if child == 0:
        open("/proc/self/comm", "w").write(name)
        os.write(1, b".")
        time.sleep(60)
    print(child, end=" ", flush=True)
os.write(1, b"|\\n")
time.sleep(60)
"""


def _is_alive(descriptor: int) -> bool:
    try:
        signal.pidfd_send_signal(descriptor, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.timeout(20)
def test_a_watcher_ends_a_tree_and_leaves_other_watchers_their_work() -> None:
    """Only the watcher of a group ends what that group forks while it is being killed."""
    root = subprocess.Popen([sys.executable, "-c", TREE], stdout=subprocess.PIPE)
    assert root.stdout is not None
    said = b""
    while said.count(b".") < 2 or b"|" not in said:
        said += os.read(root.stdout.fileno(), 100)
    ordinary, other = map(int, said.replace(b".", b"").split(b"|")[0].split())
    descriptors = [os.pidfd_open(pid) for pid in (ordinary, other)]
    try:
        watcher._kill_tree(root.pid)
        assert root.wait(timeout=5) == -signal.SIGKILL
        deadline = 100
        while _is_alive(descriptors[0]) and (deadline := deadline - 1):
            signal.sigtimedwait([], 0.02)
        assert [_is_alive(descriptor) for descriptor in descriptors] == [False, True]
    finally:
        if _is_alive(descriptors[1]):
            signal.pidfd_send_signal(descriptors[1], signal.SIGKILL)
        for descriptor in descriptors:
            os.close(descriptor)
        root.stdout.close()
