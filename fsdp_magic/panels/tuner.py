"""The tuner's panel; pure."""

from fsdp_magic.panels.tuner_view import TunerView


def html(view: TunerView) -> str:
    """Return it as HTML."""
    return text(view)


def text(view: TunerView) -> str:
    """Return the same as text."""
    return repr(view)
