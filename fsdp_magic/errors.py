"""The exceptions, under the name that people import; drawn in ``core/errors.py``."""

from fsdp_magic.core.errors import (
    CellFailedError,
    CellInterrupted,
    EngineDiedError,
    FsdpError,
    OutOfMemoryOnRankError,
    RanksDivergedError,
    UsageError,
)

__all__ = [
    "CellFailedError",
    "CellInterrupted",
    "EngineDiedError",
    "FsdpError",
    "OutOfMemoryOnRankError",
    "RanksDivergedError",
    "UsageError",
]
