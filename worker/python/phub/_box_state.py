"""The state of a DistributedOptimizer's parameters, which is at the box, in PyTorch's layout."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from torch.optim import Optimizer

from phub._exchanged import Exchanged, fetch_state, has_steps, send_state
from phub.worker import Worker


class Elsewhere(defaultdict[Any, Any]):
    """Empty, and yet true: torch.distributed.checkpoint makes a step of its own where none is."""

    def __bool__(self) -> bool:
        return True


class BoxState:
    """Fetches it, and sends what was loaded."""

    def __init__(
        self,
        worker: Worker,
        parameters: Sequence[Exchanged],
        rule: str,
        optimizer: Optimizer,
    ) -> None:
        """optimizer: the program's, which has the state of parameters that are not exchanged."""
        self._worker = worker
        self._parameters = parameters
        self._rule = rule
        self._optimizer = optimizer
        self._loaded: Mapping[Any, Any] | None = None  # and not sent yet

    def send_first(self) -> None:
        """What the program's optimizer has, if it has made steps and the job begins with it."""
        if self._worker.initial_counts and has_steps(self._parameters, self._optimizer.state):
            send_state(self._worker, self._parameters, self._optimizer.state)

    def fetch(self) -> dict[Any, Any]:
        """That of all parameters."""
        fetched = fetch_state(
            self._worker, self._parameters, self._rule, self._optimizer.param_groups
        )
        return {**self._optimizer.state, **fetched}

    def refuse_in_round(self, what: str) -> None:
        """Raises RuntimeError if a gradient is under way."""
        for each in self._parameters:
            if each.pushed:
                raise RuntimeError(
                    f"{what} between backward() and step(): the gradient of '{each.name}' is under "
                    "way. Call it after step()"
                )

    def load(self, state: Mapping[Any, Any]) -> None:
        """It goes out with send_loaded()."""
        self._loaded = dict(state)

    def forget_loaded(self) -> None:
        """The box has another state, which counts."""
        self._loaded = None

    def send_loaded(self) -> None:
        """With the parameters as they are now; rank 0's counts."""
        loaded, self._loaded = self._loaded, None
        if loaded is None:
            return
        if self._worker.rank == 0:
            send_state(self._worker, self._parameters, loaded)
        for each in self._parameters:
            each.note_written()

    def leave_others(self, state: Mapping[Any, Any]) -> Elsewhere:
        """The program's optimizer keeps only the state of parameters that are not exchanged."""
        exchanged = {each.tensor for each in self._parameters}
        others = {tensor: kept for tensor, kept in state.items() if tensor not in exchanged}
        self._optimizer.state.clear()
        self._optimizer.state.update(others)
        return Elsewhere(dict)
