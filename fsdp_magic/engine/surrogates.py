"""ENGINE: text that no message can carry, made text that one can; pure.

A file name that is no UTF-8 comes from ``os.listdir`` with lone surrogates in it, and UTF-8 has no
bytes for those: Jupyter's messages fail on them, here or in the notebook.
"""

from __future__ import annotations

from typing import Any


def encodable(text: str) -> str:
    """Return a text with lone surrogates spelt out, as their escapes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode(errors="backslashreplace").decode()
    return text


def encodable_bundle(value: Any) -> Any:
    """Return what JSON can hold, the text in it made encodable."""
    match value:
        case str():
            return encodable(value)
        case dict():
            return {encodable_bundle(key): encodable_bundle(item) for key, item in value.items()}
        case list() | tuple():
            return [encodable_bundle(item) for item in value]
        case _:
            return value
