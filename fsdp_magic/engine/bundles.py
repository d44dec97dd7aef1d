"""ENGINE: values as MIME bundles, the form in which a notebook shows them."""

from __future__ import annotations

from typing import Any

from ipykernel.jsonutil import encode_images, json_clean

from fsdp_magic.core.cell_output import ResultReport, shortened
from fsdp_magic.engine.surrogates import encodable, encodable_bundle

LIMIT_BYTES = 5_000_000
_WIDGET = "application/vnd.jupyter.widget-view+json"
_WIDGET_TEXT = (
    "a widget cannot work on an engine: print or display() what it shows, or make it in the "
    "notebook from values that %fsdp_pull brings (for a progress bar: from tqdm import tqdm)"
)


def allowed(bundle: dict[str, Any]) -> dict[str, Any]:
    """Return a bundle, or a line in its place if a notebook could not show or hold it."""
    if _WIDGET in bundle:
        return {"text/plain": _WIDGET_TEXT}
    size = sum(len(value) for value in bundle.values() if isinstance(value, (str, bytes)))
    if size <= LIMIT_BYTES:
        return bundle
    largest = max(bundle, key=lambda kind: len(bundle[kind]))
    return {
        "text/plain": (
            f"a display of {size / 1e6:.1f} MB ({largest}) is left out, the limit is 5 MB: make it "
            "smaller (a lower dpi, fewer rows), or save it to a file"
        )
    }


def result_of(value: Any, *, shell: Any) -> ResultReport:
    """Return the value of a last expression as what is shown of it.

    Args:
        value: None if there is none.
        shell: the engine's IPython, which knows how to format values.
    """
    if value is None:
        return ResultReport()
    text = encodable(shortened(repr(value)))
    data, metadata = shell.display_formatter.format(value)
    if not data:  # it has a display of its own, which has happened
        return ResultReport(text=text, bundle=None)
    if set(data) == {"text/plain"}:
        return ResultReport(text=text)
    bundle = encodable_bundle(allowed(json_clean(encode_images(data))))  # type: ignore[no-untyped-call]
    about = encodable_bundle(json_clean(metadata))  # type: ignore[no-untyped-call]
    return ResultReport(text=text, bundle=bundle, metadata=about)
