"""ENGINE: entry of an engine that is not forked, ``python -m fsdp_magic.engine``.

The order matters. The watcher is forked first, while this process is small and has one thread;
then torch is imported, while the controller starts; only then does the engine register, so a
registered engine answers at once.
"""

from __future__ import annotations

import faulthandler

from fsdp_magic.engine.watcher import guard, kernel_descriptor


def main() -> None:
    """Fork the watcher, import torch, become an ipyparallel engine."""
    guard(kernel_descriptor())
    run()


def run() -> None:
    """Become an ipyparallel engine; the watcher is there."""
    faulthandler.enable()  # a crash in C code leaves the lines it happened at in the log
    from fsdp_magic.engine.application import EngineApplication

    EngineApplication.launch_instance()


if __name__ == "__main__":
    main()
