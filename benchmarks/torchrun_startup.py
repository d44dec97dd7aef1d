"""A plain program for ``torchrun``: what ``startup.py`` compares with.

The imports are those that an engine has when it is ready. The first all_reduce returns, the
rank says when, and stays until its socket closes.
"""

from __future__ import annotations

import json
import socket
import sys
import time

import torch
import torch.distributed as dist
import torch.distributed.fsdp
import torch.distributed.tensor


def main() -> None:
    """Reduce once, and say when it was done."""
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    done = time.monotonic()
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(sys.argv[1])
    channel = connection.makefile("rw")
    channel.write(json.dumps({"done": done}) + "\n")
    channel.flush()
    channel.readline()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
