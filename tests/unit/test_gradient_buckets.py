"""Which gradients are reduced together, and in which order."""

from __future__ import annotations

import torch
from torch import nn

from fsdp_magic.engine.parallel.gradient_buckets import BUCKET_BYTES, buckets_of


def parameter(count: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.empty(count, dtype=dtype))


def test_a_large_one_is_alone_and_small_ones_share_until_their_bucket_is_full():
    large, small = BUCKET_BYTES // 4, BUCKET_BYTES // 16
    parameters = [parameter(n) for n in (small, large, small, small, small, small, 0, 5)]
    a, b, c, d, e, f, g, h = parameters
    assert [[id(p) for p in bucket] for bucket in buckets_of(parameters)] == [
        [id(b)],
        [id(a), id(c), id(d), id(e)],
        [id(f), id(g), id(h)],
    ]


def test_dtypes_do_not_share_a_bucket():
    parameters = [parameter(5), parameter(5, torch.float64), parameter(5)]
    buckets = buckets_of(parameters)
    assert sorted(len(bucket) for bucket in buckets) == [1, 2]
    assert all(len({p.dtype for p in bucket}) == 1 for bucket in buckets)


def test_every_parameter_is_in_one_bucket():
    parameters = [parameter(n * 997) for n in range(40)]
    found = [id(p) for bucket in buckets_of(parameters) for p in bucket]
    assert sorted(found) == sorted(map(id, parameters))
    assert buckets_of([]) == []
