"""What the kernel and its fork server say to each other; pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Role = Literal["controller", "engine"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkRequest:
    """Kernel to fork server: make a process.

    Attributes:
        number: names the process in reports.
        role: what it becomes.
        arguments: of its command line.
        environment: all of its environment.
        directory: where it runs.
        output: the file that takes what it prints.
        channel: whether a descriptor comes with this request: the engine's channel.
    """

    number: int
    role: Role
    arguments: tuple[str, ...]
    environment: dict[str, str]
    directory: str
    output: str
    channel: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkedReport:
    """Fork server to kernel: the process is there; its process descriptor comes along."""

    number: int
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedReport:
    """Fork server to kernel: it cannot fork safely, and why; start the process otherwise."""

    number: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedReport:
    """Fork server to kernel: a process ended. ``exit_code`` is negative for a signal."""

    number: int
    exit_code: int
