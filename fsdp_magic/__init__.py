"""Sharded training from a notebook: IPython magics over ipyparallel engines, one per GPU.

Importing this package imports neither torch nor IPython; ``%load_ext fsdp_magic`` does the
least that registers the magics.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fsdp_magic import errors

if TYPE_CHECKING:
    from fsdp_magic.notebook.planning import plan
    from fsdp_magic.notebook.sessions import init

__version__ = "0.1.0"
__all__ = [
    "__version__",
    "errors",
    "init",
    "load_ipython_extension",
    "plan",
    "unload_ipython_extension",
]


def __getattr__(name: str) -> Any:
    """Import ``init`` and ``plan`` when first asked for: engines import this package too."""
    if name == "init":
        from fsdp_magic.notebook.sessions import init

        return init
    if name == "plan":
        from fsdp_magic.notebook.planning import plan

        return plan
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__


def load_ipython_extension(shell: Any) -> None:
    """Register the magics and their completion; IPython calls this for ``%load_ext fsdp_magic``."""
    from fsdp_magic.notebook import completion, px
    from fsdp_magic.notebook.magics import FsdpMagics

    shell.register_magics(FsdpMagics)
    completion.register(shell)
    px.stand_in(shell)


def unload_ipython_extension(shell: Any) -> None:
    """Take the magics and their completion away; engines that run go on running."""
    from fsdp_magic.notebook import completion, px
    from fsdp_magic.notebook.magics import unregister

    px.remove(shell)
    completion.unregister(shell)
    unregister(shell)
