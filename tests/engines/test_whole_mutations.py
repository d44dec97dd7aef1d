"""A wrong reduction or gathering of whole models must not pass: see ``test_mutations``."""

from __future__ import annotations

import pytest
from equality import assert_equal
from programs import Program, in_one_process, on_engines
from test_whole_models import CELLS, NET
from whole_models import SMALL_BUCKETS, changed

from fsdp_magic.errors import CellFailedError
from fsdp_magic.notebook.session import Session

PROGRAM = Program(built=NET, cell="x, y = batch" + CELLS["a part used on one rank"])
MUTATIONS = {
    "a bucket not reduced": """
def _launch(self, parameters, _o=_b.GradientReduction._launch):
    if self._launched == 1:  # of what both ranks use
        self._launched = 2
    else:
        _o(self, parameters)
_b.GradientReduction._launch = _launch
""",
    "a bucket reduced twice": """
def finish(self, _o=_b.GradientReduction.finish):
    _o(self)
    self._launched -= 1
    _o(self)
_b.GradientReduction.finish = finish
""",
    "a bucket launched before it is complete": """
def arrived(self, parameter):
    self._missing[self._bucket_of[id(parameter)]] = 0
    while self._launched < len(self._buckets) and not self._missing[self._launched]:
        self._launch([p for p in self._buckets[self._launched] if p.grad is not None])
_b.GradientReduction.arrived = arrived
""",
    "buckets launched in another order on one rank": """
def buckets_of(parameters, _o=_b.buckets_of):
    return _o(parameters)[:: -1 if rank == 1 else 1]
_w.buckets_of = buckets_of
""",
    "sums not copied back": """
_b._UnderWay.land = lambda self: self.work.wait()
""",
    "zeros missing": """
_w.WholeModel.fill_missing = lambda self, used: None
""",
    "rows not gathered": """
_z.gather_rows = lambda parameters, **rest: None
""",
    "large rows gathered from the wrong ranks": """
def gather(tensor, group, world, _o=_r._gather_in_place):
    _o(tensor, group, world)
    tensor.copy_(tensor.roll(1, 0))
_r._gather_in_place = gather
""",
    "small rows gathered from the wrong ranks": """
def gather(tensors, group, world, _o=_r._gather_together):
    _o(tensors, group, world)
    for tensor in tensors:
        tensor.copy_(tensor.roll(1, 0))
_r._gather_together = gather
""",
    "a shard's gradient from another rank's rows": """
def own_rows(tensor, world):
    return _r.rows_of(tensor, world, 1 - world.rank)
_v.own_rows = own_rows
""",
}
_OF_ZERO1 = ("zeros", "rows", "large", "small", "a shard")


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_equality_catches(session, mutation):
    strategy = "zero1" if mutation.startswith(_OF_ZERO1) else "ddp"
    with (
        changed(session, SMALL_BUCKETS + MUTATIONS[mutation]),
        pytest.raises((AssertionError, CellFailedError)),
    ):
        check(session, strategy)


def check(session: Session, strategy: str) -> None:
    measured = on_engines(session, PROGRAM, strategy=strategy, accumulate=2)
    assert_equal(measured, in_one_process(PROGRAM, accumulate=2), tolerance=1e-9)


@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
def test_equality_holds_after_all_mutations(session, strategy):
    with changed(session, SMALL_BUCKETS):
        check(session, strategy)
