"""ENGINE: random states: cells draw alike on all ranks, training cells differently on each.

Plain cells must draw alike, or ranks would build different models. Training cells must not, or
every rank would drop the same units. So training has a state of its own, which is put in place
around a run.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_RANK_STRIDE = 1_000_003


class TrainingRandomness:
    """The random state of training cells on this rank.

    Args:
        seed: of the session.
        rank: the data-parallel rank.

    Attributes:
        state: of training; None: it has not begun.
        outside: what is put back when training leaves; None: it is not in place.
    """

    def __init__(self, seed: int, rank: int) -> None:
        self._seed = (seed * 7919 + 1 + rank * _RANK_STRIDE) % 2**32
        self.state: dict[str, Any] | None = None
        self.outside: dict[str, Any] | None = None

    @contextmanager
    def in_place(self, *, kept: bool = True) -> Iterator[None]:
        """Draw from the training state inside.

        Args:
            kept: whether to go on from there the next time, or from where this time began.
        """
        before, self.outside = self.outside, capture()
        if self.state is None:
            seed_all(self._seed)
        else:
            restore(self.state)
        try:
            yield
        finally:
            if kept:
                self.state = capture()
            restore(self.outside)
            self.outside = before


@contextmanager
def put_back() -> Iterator[None]:
    """Have every generator afterwards as it was before."""
    state = capture()
    try:
        yield
    finally:
        restore(state)


def seed_all(seed: int) -> None:
    """Seed torch, ``random`` and numpy."""
    random.seed(seed)
    torch.manual_seed(seed)
    numpy = _numpy()
    if numpy is not None:
        numpy.random.seed(seed % 2**32)


def capture() -> dict[str, Any]:
    """Return the state of every generator."""
    numpy = _numpy()
    return {
        "random": random.getstate(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if _uses_cuda() else None,
        "numpy": None if numpy is None else numpy.random.get_state(),
    }


def restore(state: dict[str, Any]) -> None:
    """Put the state of every generator back."""
    random.setstate(state["random"])
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"])
    if state["numpy"] is not None:
        _numpy().random.set_state(state["numpy"])


def _uses_cuda() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _numpy() -> Any:
    try:
        import numpy
    except ImportError:
        return None
    return numpy
