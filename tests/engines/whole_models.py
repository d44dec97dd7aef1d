"""What tests of models that every rank holds whole share: tiny buckets, and broken reductions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fsdp_magic.notebook.session import Session

_ORIGINALS = """
from fsdp_magic.engine.parallel import gradient_buckets as _b, row_gathering as _r
from fsdp_magic.engine.parallel import whole_model as _w, zero1 as _z, shard_views as _v
_places = [
    (_b, "BUCKET_BYTES"), (_b, "_MOST_COPIED_BYTES"), (_r, "BUCKET_BYTES"),
    (_r, "_gather_in_place"), (_r, "_gather_together"), (_b._UnderWay, "land"),
    (_b.GradientReduction, "_launch"), (_b.GradientReduction, "finish"),
    (_b.GradientReduction, "arrived"), (_w, "buckets_of"), (_w.WholeModel, "fill_missing"),
    (_z, "gather_rows"), (_v, "own_rows"),
]
_originals = [(owner, name, getattr(owner, name)) for owner, name in _places]
"""
_RESTORE = "for owner, name, value in _originals:\n    setattr(owner, name, value)\n"
SMALL_BUCKETS = """
_b.BUCKET_BYTES, _b._MOST_COPIED_BYTES, _r.BUCKET_BYTES = 600, 900, 600
"""
"""So small that tiny models have gradients of their own buckets, and buckets wait for room."""


@contextmanager
def changed(session: Session, code: str) -> Iterator[None]:
    """Have the engines' code changed inside."""
    session.run(_ORIGINALS, show=False)
    session.run(code, show=False)
    try:
        yield
    finally:
        session.run(_RESTORE, show=False)
