"""What is done seldom takes a small share of the time, however much it costs."""

from __future__ import annotations

import time

import pytest

from fsdp_magic.engine.time_share import SHARE, TimeShare


def worked(seconds: float) -> float:
    """Return how long this thread computed."""
    began = time.thread_time()
    while time.thread_time() - began < seconds:
        pass
    return time.thread_time() - began


@pytest.mark.parametrize("times", [1, 3])
def test_a_dear_one_is_put_off_by_what_it_cost(times):
    share = TimeShare(least_seconds=0.1)
    assert share.is_due(10.0)
    cost = 0.0
    for _ in range(times):
        with share.spending():
            cost += worked(0.002)
    assert not share.is_due(10.0 + cost / SHARE)
    assert share.is_due(10.0 + 0.1 + 1.5 * cost / SHARE)


def test_a_cheap_one_is_due_again_after_the_least_time():
    share = TimeShare(least_seconds=0.1)
    assert share.is_due(10.0)
    assert not share.is_due(10.09)
    assert share.is_due(10.11)
    assert not share.is_due(10.12)
