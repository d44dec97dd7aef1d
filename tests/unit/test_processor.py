"""The name of the processor that a CPU rank runs on."""

from __future__ import annotations

import platform

from fsdp_magic.engine.processor import processor_name, shortened

NAMES = {
    " Intel(R) Xeon(R) Platinum 8581C CPU @ 2.30GHz\n": "Intel Xeon Platinum 8581C",
    " AMD EPYC 9B14 96-Core Processor\n": "AMD EPYC 9B14",
    " AMD Ryzen 7 5800U with Radeon Graphics\n": "AMD Ryzen 7 5800U",
    " 13th Gen Intel(R) Core(TM) i7-1360P\n": "13th Gen Intel Core i7-1360P",
    " AMD EPYC\n": "AMD EPYC",
    "": "",
}


def test_a_processor_has_a_short_name() -> None:
    assert {name: shortened(name) for name in NAMES} == NAMES
    assert processor_name()
    assert processor_name() != "x86_64" or platform.machine() == "x86_64"
