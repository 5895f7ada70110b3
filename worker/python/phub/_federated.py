"""A round of federated averaging through a box: a server gives arrays, and clients give them back.

Each round is a job: the server is rank 0, with arrays that all begin with, and each client a rank
whose arrays count as much as it has examples. It needs NumPy.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from phub._numbers import whole_number
from phub._options import Key, Option, check_results
from phub.errors import InvalidError
from phub.worker import Worker

Arrays = dict[str, "np.ndarray[Any, Any]"]

_NOTHING = 2.0**-126  # the least weight: a sum of numbers of examples is the same with it
_LIMIT_MS = 3_600_000  # as Flower's `timeout`: clients train for long


@dataclass(frozen=True)
class Plan:
    """What every rank of a round knows."""

    job: str
    ranks: int  # the server and its clients
    shapes: Mapping[str, tuple[int, ...]]
    options: Mapping[str, Option] = field(default_factory=dict)
    averages: bool = True  # False: clients get the arrays, and give none back

    def text(self) -> str:
        """For a message to a client."""
        return json.dumps(asdict(self))

    @staticmethod
    def of_text(text: str) -> Plan:
        """The same there."""
        try:
            found = json.loads(text)
            shapes = {
                str(name): tuple(whole_number("shape", size, 40) for size in shape)
                for name, shape in found.pop("shapes").items()
            }
            plan = Plan(shapes=shapes, **found)
            whole_number("ranks", plan.ranks, 16)
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            raise InvalidError(f"the server's message has no plan of a round: {error}") from None
        return plan

    def join(self, rank: int) -> Worker:
        """Returns when all ranks have joined, or join_limit_ms is over and min_ranks have."""
        given: dict[str, Option] = {"min_ranks": min(2, self.ranks), "progress_limit_ms": _LIMIT_MS}
        given |= {"on_nonfinite": "pass", **self.options, "max_ranks": 0, "initial": "broadcast"}
        given |= {"reduction": "mean", "weights": "yes"} if self.averages else {}
        keys = {name: Key(math.prod(shape), shape=shape) for name, shape in self.shapes.items()}
        given |= {"job": self.job, "rank": rank, "world_size": self.ranks}
        return Worker(keys, hyper=None, formats=None, saver=None, **given)

    def found_in(self, worker: Worker) -> Arrays:
        """A copy of what the box has."""
        return {
            name: np.array(worker.parameters(name)).reshape(shape)
            for name, shape in self.shapes.items()
        }


def check_options(options: Mapping[str, Option]) -> None:
    """Raises InvalidError for those with which results would not be means of float32."""
    only = {"reduction": "mean", "weights": "yes", "initial": "broadcast", "on_loss": "shrink"}
    check_results("phub.flower", options, gradients=True, **only, parameter_dtype="f32")
    if given := sorted(options.keys() & {"job", "rank", "world_size", "max_ranks"}):
        raise InvalidError(f"phub.flower with {given[0]}: each round has its own. Leave it out")


def shapes_of(arrays: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Raises InvalidError for an array that cannot be averaged."""
    for name, array in arrays.items():
        if array.dtype != np.float32 or array.size == 0:
            raise InvalidError(
                f"array '{name}' has {array.size} elements of {array.dtype}: phub.flower averages "
                "float32 ones that are not empty. Leave it out of the ArrayRecord (counters of "
                "BatchNorm: load_state_dict(…, strict=False)), or convert it"
            )
    return {name: tuple(array.shape) for name, array in arrays.items()}


class Giver:
    """The server in a round. It waits in a thread, while the framework waits for its clients."""

    def __init__(self, plan: Plan, arrays: Arrays) -> None:
        self._plan = plan
        self._arrays = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
        self._found: Arrays | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="phub-round", daemon=True)
        self._thread.start()

    def result(self) -> Arrays:
        """The mean of the clients' arrays. Raises Error."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        assert self._found is not None
        return self._found

    def _run(self) -> None:
        try:
            with self._plan.join(0) as worker:
                flat = {name: array.reshape(-1).copy() for name, array in self._arrays.items()}
                worker.broadcast(flat)
                if self._plan.averages:
                    worker.weight(_NOTHING)
                    for name in flat:
                        worker.push_null(name)
                    worker.wait_all()
                else:
                    worker.barrier()
                self._found = self._plan.found_in(worker)
        except BaseException as error:
            self._error = error


class Taker:
    """A client in a round."""

    def __init__(self, plan: Plan, rank: int) -> None:
        """Joins, and has the server's arrays. Raises InvalidError if the others did not wait."""
        self._plan = plan
        self._worker = plan.join(rank)
        try:
            if self._worker.first_round > 1:
                raise InvalidError(
                    f"job '{plan.job}' began without this client, which came too late: raise "
                    "join_limit_ms, or let all clients of a round run at the same time"
                )
            self._worker.broadcast()
            self.arrays = plan.found_in(self._worker)
        except BaseException:
            self._worker.abandon()
            raise

    def give(self, arrays: Mapping[str, Any], weight: float) -> Arrays:
        """The mean of all clients' arrays, which count by their weights."""
        shapes = shapes_of(arrays)
        if shapes != dict(self._plan.shapes):
            differ = sorted(shapes.items() ^ self._plan.shapes.items())
            raise InvalidError(
                f"a client gives other arrays than it got: '{differ[0][0]}' {differ[0][1]} is on "
                "one side alone. Give all of them, with their names and shapes"
            )
        if not weight > 0:
            raise InvalidError(f"a client gives {weight} examples: at least 1, or let it fail")
        self._worker.weight(weight)
        for name, array in arrays.items():
            np.asarray(self._worker.gradient(name))[:] = array.reshape(-1)
            self._worker.push(name)
        self._worker.wait_all()
        return self._plan.found_in(self._worker)

    def __enter__(self) -> Taker:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """With an exception it is lost: the others go on with the mean of the rest."""
        if kind is not None:
            self._worker.abandon()
            return
        try:
            if not self._plan.averages:
                self._worker.barrier()
        finally:
            self._worker.close()
