"""The processes that train one replica of a DiLoCo together, through DDP."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import distributed

from phub._options import Option
from phub.errors import InvalidError, RankLostError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_LAUNCHED = ("PHUB_RANK", "PHUB_WORLD_SIZE")


class Island:
    """A process group whose first process speaks with the box. None: this process alone.

    All its processes make the same calls in the same order.
    """

    def __init__(self, group: ProcessGroup | None) -> None:
        self._group = group
        self.is_alone = group is None
        self.speaks = group is None or distributed.get_rank(group) == 0

    def check(self, options: Mapping[str, Option], proximal: float) -> None:
        """Raises InvalidError if ranks would be processes, or a process would have no base."""
        if self._group is None:
            return
        if proximal:
            raise InvalidError(
                f"proximal={proximal} and process_group: only the first process of an island has "
                "the base that the parameters would be held near. Leave one of the two out"
            )
        if all(name in options for name in ("rank", "world_size")):
            return
        launched = all(os.environ.get(name) for name in _LAUNCHED)
        is_one = distributed.get_world_size(self._group) == 1
        processes = str(distributed.get_world_size())
        if launched and (is_one or os.environ["PHUB_WORLD_SIZE"].strip() != processes):
            return
        raise InvalidError(
            "process_group: a rank of the job is a whole island, and what the launcher counts are "
            "processes. Say which island this is, of how many: rank=0, world_size=2"
        )

    def share(self, speak: Callable[[], None], tensors: Sequence[torch.Tensor]) -> None:
        """The first process calls this; then all have its tensors.

        Raises RankLostError if that process could not, which itself raises why.
        """
        if self._group is None:
            speak()
            return
        error: Exception | None = None
        if self.speaks:
            try:
                speak()
            except Exception as raised:
                error = raised
        if not self._tell(tensors[0].device, ok=error is None):
            raise error or RankLostError(
                "the first process of this island cannot exchange with the others: its own "
                "message says why"
            )
        for tensor in tensors:
            sent = tensor.detach().contiguous()
            distributed.broadcast(sent, group=self._group, group_src=0)
            if sent.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(sent)

    def _tell(self, device: torch.device, *, ok: bool) -> bool:
        said = torch.tensor([int(ok)], device=device)
        distributed.broadcast(said, group=self._group, group_src=0)
        return bool(said.item())
