"""The sessions in which faults strike, kept while the tests of this folder run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from stage import Stage


@pytest.fixture(scope="package")
def stage(test_run: str, kept_sessions: list[Any]) -> Iterator[Stage]:
    stage = Stage()
    kept_sessions.append(stage)
    yield stage
    kept_sessions.remove(stage)
    stage.close()
