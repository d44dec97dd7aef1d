"""Code that runs in the engines (and, in ``controller.py`` and ``watcher.py``, beside them)."""
