"""A process group for torchft's Manager: what ranks reduce on a CPU goes through a box.

After each change of the quorum torchft makes a new group; its ranks then are new to the box.
"""

# No `from __future__ import annotations`: as in pytorch.py.

from typing import Any

from torchft.process_group import ProcessGroupWrapper  # type: ignore[import-not-found]

from phub import backend


class ProcessGroupPhub(ProcessGroupWrapper):  # type: ignore[misc]
    """In place of torchft's ProcessGroupGloo: `Manager(pg=ProcessGroupPhub(timeout=…), …)`."""

    def _create_pg(self, store: Any, rank: int, world_size: int) -> Any:
        return backend.ProcessGroup(store, rank, world_size, self._timeout)

    def getBackendName(self) -> str:  # noqa: N802
        """Its name."""
        return "torchft-phub"
