"""GPUs are counted as the engines will see them."""

from __future__ import annotations

import pytest

from fsdp_magic.notebook import devices


@pytest.mark.parametrize(
    ("present", "visible", "count"),
    [
        (0, None, 0),
        (0, "0,1", 0),  # a machine without a driver, whatever the variable says
        (4, None, 4),
        (4, "", 0),
        (4, "-1", 0),
        (4, "0, 2", 2),
        (4, "0,-1,1", 1),
        (2, "0,1,2,3", 2),
        (4, "GPU-a,GPU-b", 2),
        (1, "MIG-a,MIG-b", 2),
    ],
)
def test_visible_gpus_are_counted(monkeypatch, present, visible, count):
    monkeypatch.setattr(devices, "_present", lambda: present)
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert devices.gpu_count() == count
