"""ENGINE: what torch asks of a process group beside collectives: its place and its name.

Torch's C++ side asks by method, its Python side by property, and both may set the name.
"""

from __future__ import annotations

import torch.distributed as dist


class NamedGroup(dist.ProcessGroup):
    """A process group of Python that torch can ask who it is.

    Args:
        rank, size: in this group.
        backend: the name that its backend is registered under.
    """

    def __init__(self, rank: int, size: int, backend: str) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # the stub knows one form
        self._rank = rank
        self._size = size
        self._backend = backend
        self._name = ""
        self._description = ""

    def size(self) -> int:
        """Return the number of ranks in this group."""
        return self._size

    def rank(self) -> int:
        """Return this process's rank in this group."""
        return self._rank

    def getBackendName(self) -> str:  # noqa: N802  torch's name
        """Return the name that the backend is registered under."""
        return self._backend

    @property
    def group_name(self) -> str:  # type: ignore[override]
        """The name that functional collectives find the group by."""
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:  # noqa: N802
        """Return the group's name; torch's C++ side asks here."""
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        """Set the group's name; torch's C++ side says it here."""
        self._name = name

    @property
    def group_desc(self) -> str:
        """What the group is for."""
        return self._description

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    def getGroupDesc(self) -> str:  # noqa: N802
        """Return what the group is for."""
        return self._description

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        """Set what the group is for."""
        self._description = description
