"""KERNEL: the slider for the batch size, where the optional extra ``widgets`` is installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fsdp_magic.panels.slider_view import SliderData


def slider(data: SliderData, on_change: Callable[[int], None]) -> Any | None:
    """Return a widget that takes a size, or None where anywidget is not installed.

    ``pip install 'fsdp-magic[widgets]'`` installs it; a page that was open before has to be
    loaded anew.

    Args:
        data: the sizes, and what is known of each.
        on_change: takes the size that a person chose. It may raise ``FsdpError``: then the widget
            says so in one line, and goes back to the size before.
    """
    try:
        import anywidget  # noqa: F401
    except ImportError:
        return None
    from fsdp_magic.notebook.slider_widget import BatchSizeSlider

    return BatchSizeSlider(data, on_change)
