"""What Tab asks of an engine, and is answered; data only, pure. The rest is in protocol.py."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CompleteRequest:
    """Say what may stand at the end of a line.

    Attributes:
        line: what was typed, up to the cursor.
        seconds: how long it may take.
    """

    line: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Completions:
    """What may stand at the end of a line.

    Attributes:
        fragment: the end of the line that each text replaces.
        texts: what may stand there.
    """

    fragment: str
    texts: tuple[str, ...]
