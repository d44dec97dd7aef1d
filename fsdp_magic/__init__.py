"""Sharded training from a notebook: IPython magics over ipyparallel engines, one per GPU.

Importing this package imports neither torch nor IPython; ``%load_ext fsdp_magic`` does the
least that registers the magics.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fsdp_magic import errors
from fsdp_magic.core.specs import InitSpec
from fsdp_magic.notebook.help import takes_options

if TYPE_CHECKING:
    from fsdp_magic.notebook.session import Session

__version__ = "0.1.0"
__all__ = ["__version__", "errors", "init", "load_ipython_extension", "unload_ipython_extension"]


@takes_options(InitSpec)
def init(*, show: bool = True, **options: Any) -> Session:
    """Start engines, or return the running session if it is the one asked for.

    Args:
        show: show ranks, hosts and devices.
        **options: as below; they mean what they mean for ``%fsdp_init``.

    Raises:
        fsdp_magic.errors.UsageError: if an option cannot work.
        fsdp_magic.errors.FsdpError: if the engines did not start.
    """
    from fsdp_magic.notebook import sessions

    return sessions.init(show=show, **options)


def load_ipython_extension(shell: Any) -> None:
    """Register the magics and their completion; IPython calls this for ``%load_ext fsdp_magic``."""
    from fsdp_magic.notebook import completion
    from fsdp_magic.notebook.magics import FsdpMagics

    shell.register_magics(FsdpMagics)
    completion.register(shell)


def unload_ipython_extension(shell: Any) -> None:
    """Take the magics and their completion away; engines that run go on running."""
    from fsdp_magic.notebook import completion
    from fsdp_magic.notebook.magics import unregister

    completion.unregister(shell)
    unregister(shell)
