"""KERNEL: values on their way to the engines and back, pickled."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import Any

from fsdp_magic.core.errors import UsageError


def packed(variables: Mapping[str, Any]) -> dict[str, bytes]:
    """Return variables as they are sent.

    Raises:
        UsageError: if one cannot be pickled.
    """
    sent = {}
    for name, value in variables.items():
        try:
            sent[name] = pickle.dumps(value)
        except Exception as error:  # whatever an object's own pickling raises
            raise UsageError(
                f"{name} cannot be sent to the engines ({error}); make it there, in a %%fsdp cell"
            ) from None
    return sent


def unpacked(sent: bytes, *, expression: str) -> Any:
    """Return a value that came from an engine.

    Args:
        sent: as it came.
        expression: what it is the value of, for errors.

    Raises:
        UsageError: if it cannot be read here.
    """
    try:
        return pickle.loads(sent)
    except Exception as error:  # whatever an object's own unpickling raises
        raise UsageError(
            f"{expression} cannot be read in the notebook ({error}); pull a part of it, or "
            f"its text: repr({expression})"
        ) from None
