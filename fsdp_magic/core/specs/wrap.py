"""``--wrap``: the rule that says which modules become units, as text; pure."""

from __future__ import annotations

import re
from typing import Any

from fsdp_magic.core.errors import UsageError
from fsdp_magic.core.wording import as_typed, quoted

WORDS = ("blocks", "none")
SIZE = "size"
_NUMBER = re.compile(r"([\d_]+(?:\.\d+)?(?:e\d+)?)([kmb]?)", re.IGNORECASE | re.ASCII)
_FACTORS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9}
_MOST = 10**15
_TAKES = "it takes blocks, size:NUM_PARAMS, CLASS[,CLASS] or none"


def checked_wrap(value: Any) -> str:
    """Return a rule as our code reads it: ``blocks``, ``none``, ``size:1000000``, ``A,B``.

    Raises:
        UsageError: if it is no rule.
    """
    names = value if isinstance(value, (list, tuple)) else [value]
    if not names or not all(isinstance(name, str) and name.strip() for name in names):
        raise UsageError(f"--wrap {quoted(value)} cannot work; {_TAKES}")
    rule = ",".join(name.strip() for name in ",".join(names).split(","))
    if rule.lower() in WORDS:
        return rule.lower()
    word, colon, number = rule.partition(":")
    if colon and word.lower() == SIZE:
        return f"{SIZE}:{_number_of_parameters(number)}"
    if rule.lower() == SIZE:
        raise UsageError(f"--wrap {rule} needs a number of parameters, such as size:1000000")
    if _NUMBER.fullmatch(rule):
        near = as_typed(f"{SIZE}:{rule}")
        raise UsageError(f"--wrap {as_typed(rule)} is no rule; did you mean {near}?")
    if not all(name.isidentifier() for name in rule.split(",")):
        raise UsageError(f"--wrap {quoted(value)} is no rule; {_TAKES}")
    return rule


def least_parameters(rule: str) -> int | None:
    """Return the number of a ``size:`` rule; None if it is another one."""
    word, _, number = rule.partition(":")
    return int(number) if word == SIZE else None


def class_names(rule: str) -> tuple[str, ...]:
    """Return the class names of a rule; none if it is another one."""
    return () if rule in WORDS or ":" in rule else tuple(rule.split(","))


def _number_of_parameters(text: str) -> int:
    """Return a number of parameters from text such as ``2000``, ``1e6``, ``100M``."""
    match = _NUMBER.fullmatch(text.strip()) if len(text) < 30 else None
    try:
        number = float(match[1]) * _FACTORS[match[2].lower()] if match else 0.0
    except ValueError:
        number = 0.0
    if not 1 <= number <= _MOST:
        raise UsageError(
            f"--wrap size:{as_typed(text)} cannot work; it takes a number of parameters from 1, "
            "such as size:1000000 or size:1M"
        )
    return int(number)
