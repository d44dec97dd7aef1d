"""CONTROLLER: entry of ipyparallel's controller, guarded so that it dies with the kernel.

``python -m fsdp_magic.engine.controller`` takes the arguments of ``ipcontroller``.
"""

from __future__ import annotations

import os

from fsdp_magic.engine.watcher import guard, kernel_descriptor


def main() -> None:
    """Fork the watcher, then become the controller."""
    directory = os.environ.get("IPP_PROFILE_DIR")
    guard(kernel_descriptor(remove=directory), remove=directory)
    run()


def run() -> None:
    """Become the controller; the watcher is there."""
    from ipyparallel.controller.app import main as controller_main

    controller_main()


if __name__ == "__main__":
    main()
