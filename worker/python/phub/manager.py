"""A training that goes on while ranks come and go, with the calls of torchft's Manager.

A step is begin, allreduce, commit. Ranks find each other anew in each step (_quorum.py), average
tensors (_batches.py), and whoever lacks the state of the others gets it over the box
(_given_state.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from types import TracebackType
from typing import Any, NoReturn

import torch
from torch.futures import Future

from phub import _given_state, errors
from phub._batches import Batches, Given
from phub._managed import DistributedDataParallel, Optimizer, allreduce_gradients
from phub._numbers import real_number, whole_number
from phub._options import Option, check_results
from phub._quorum import Quorum, Standing, course_of
from phub.errors import InvalidError, MismatchError
from phub.worker import fails

__all__ = ["DistributedDataParallel", "Manager", "Optimizer", "Work", "allreduce_gradients"]

_TRIES = 5  # of a rank that lacks the state of the others
_MOST_SECONDS = 7 * 24 * 3600
# Options of the job of all ranks, and those of the jobs that average tensors.
_OF_RANKS = ("job", "rank", "world_size", "min_ranks", "max_ranks", "replace", "join_limit_ms")
_OF_TENSORS = ("gradient_dtype", "parameter_dtype", "rounding", "on_nonfinite", "groups")
# Those that the Manager sets itself.
_ONCE = {"reduction": "mean", "on_loss": "shrink", "initial": "zeros", "weights": "no"}

_BOX = "the box is the only connection: leave it out, and say box='host:7717' or PHUB_SERVER"
_OWN = "state comes over the box, in a job JOB-state-ROUND: leave it out"
# What torchft's Manager takes, and this one has not.
_NOT_TAKEN = {
    "pg": _BOX,
    "lighthouse_addr": _BOX,
    "store_addr": _BOX,
    "store_port": _BOX,
    "port": _BOX,
    "hostname": _BOX,
    "replica_id": "a rank has a number: say rank=N or PHUB_RANK",
    "checkpoint_transport": _OWN,
    "heartbeat_interval": "say lease_ms, after which a silent rank is lost",
    "quorum_timeout": "say progress_limit_ms: who keeps others waiting for so long is lost",
    "connect_timeout": "say connect_timeout_ms",
    "quorum_retries": "a program that outlives its box is started again, by its supervisor",
    "world_size_mode": "all ranks that are there take part: spares are ranks that join later",
}
_NO_METHOD = {
    "wrap_future": "what fails in a future of your own is for report_error()",
    "set_state_dict_fns": "use register_state_dict_fn()",
    "allow_state_dict_read": "state is read in wait_quorum() alone, in the caller's thread",
    "disallow_state_dict_read": "state is read in wait_quorum() alone, in the caller's thread",
}


def _limit_ms(seconds: float) -> int:
    if not 0 < seconds <= _MOST_SECONDS:
        raise InvalidError(f"timeout is {seconds} s: it must be above 0 and at most a week")
    return max(1, int(1000 * seconds))


class Work:
    """A tensor on its way. After wait() it has the mean."""

    def __init__(self, manager: Manager, tensor: torch.Tensor, given: Given | None) -> None:
        self._manager, self._tensor, self._given = manager, tensor, given

    def wait(self, timeout: timedelta | None = None) -> bool:  # noqa: ARG002
        """False: there was an error in this step; the tensor may be anything.

        The timeout is torchft's; here the job's limits say how long others are waited for.
        """
        given, self._given = self._given, None
        return self._manager._take(given)

    def get_future(self) -> Future[torch.Tensor]:
        """Waits, and returns a future that is done: call it when the tensor is needed."""
        self.wait()
        future: Future[torch.Tensor] = Future()
        future.set_result(self._tensor)
        return future


class Manager:
    """The steps of a training whose ranks come and go, as torchft.Manager has them.

        manager = phub.Manager(load_state_dict, state_dict, min_replica_size=2)
        while manager.current_step() < 1000:
            manager.start_quorum()
            ...backward()...
            for work in [manager.allreduce(p.grad) for p in model.parameters()]:
                work.wait()
            if manager.should_commit():
                optimizer.step()

    One thread calls it at a time. In each step all ranks give the same tensors in the same order.
    """

    def __init__(
        self,
        load_state_dict: Callable[[Any], Any] | None = None,
        state_dict: Callable[[], Any] | None = None,
        *,
        min_replica_size: int = 1,
        use_async_quorum: bool = True,
        timeout: timedelta | float = 60,
        init_sync: bool = True,
        max_retries: int | None = None,
        **options: Any,
    ) -> None:
        """Sends nothing yet: the first start_quorum() joins the job.

        load_state_dict, state_dict: as `register_state_dict_fn` takes them.
        min_replica_size: a step that begins with fewer ranks does not count.
        use_async_quorum: start_quorum() returns at once, and the first allreduce() waits for the
            ranks, but in a rank that needs the state of another.
        timeout: seconds, or a timedelta, for which the ranks that are found wait for each other
            where they make jobs anew.
        init_sync: all ranks begin with the state of one. False: they have the same already.
        max_retries: so many steps in a row may not count; with one more it is a RuntimeError.
        options: of `Worker`, such as job, box, rank, world_size, max_ranks, lease_ms; and
            gradient_dtype for the tensors.
        Raises InvalidError, which names what torchft has and phub has not.
        """
        for name in options.keys() & _NOT_TAKEN.keys():
            raise InvalidError(f"phub.Manager has no {name}: {_NOT_TAKEN[name]}")
        for name in options.keys() & {"memory_device", "saver", "hyper", "formats", "branches"}:
            raise InvalidError(f"phub.Manager has no {name}: leave it out")
        check_results("phub.Manager", options, gradients=True, **_ONCE)
        self._options: dict[str, Option] = {n: v for n, v in options.items() if n not in _ONCE}
        self._min = whole_number("min_replica_size", min_replica_size, 16)
        self._is_async = use_async_quorum
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        self._limit_ms = _limit_ms(real_number("timeout", seconds))
        self._syncs, self._max_retries = init_sync, max_retries
        if max_retries is not None:
            whole_number("max_retries", max_retries, 32)
        self._functions: dict[str, tuple[Callable[[Any], Any], Callable[[], Any]]] = {}
        if load_state_dict and state_dict:
            self.register_state_dict_fn("default", load_state_dict, state_dict)
        self._quorum: Quorum | None = None
        self._batches: Batches | None = None
        self._exchange = 0  # the round in which its ranks were found; 0: there is none
        self._members: tuple[int, ...] = ()
        self._step = self._committed = self._failures = 0
        self._is_sound = not init_sync
        self._must_wait = True  # this rank may need the state of another
        self._is_asked = False  # the ranks, and they have not answered
        self._is_open = False  # a step has begun, and has not ended
        self._error: BaseException | None = None

    def register_state_dict_fn(
        self, key: str, load_state_dict: Callable[[Any], Any], state_dict: Callable[[], Any]
    ) -> None:
        """What a rank that lacks the state gets from another: all ranks register the same keys.

        state_dict() returns numbers, strings, tensors, and lists, tuples and dicts of these. It is
        called in wait_quorum(), and so in start_quorum() or the first allreduce().
        """
        if key in self._functions:
            raise InvalidError(f"register_state_dict_fn: '{key}' is registered already")
        self._functions[key] = (load_state_dict, state_dict)

    # ---- A step.

    def start_quorum(
        self,
        allow_heal: bool = True,  # noqa: FBT001, FBT002
        shrink_only: bool = False,  # noqa: FBT001, FBT002
        timeout: timedelta | None = None,  # noqa: ARG002
    ) -> None:
        """Begins a step: asks which ranks take part. Call it before forward().

        Joins at the first time. A rank that joins later, or that lacks a step that others have
        made, has their state when it returns. A step that has begun, gave some tensors and was not
        ended is given up: the rank gets the state of those that have made it. The timeout is
        torchft's: see progress_limit_ms.
        Raises Error if the box is gone, or this rank is lost.
        """
        if not allow_heal or shrink_only:
            raise InvalidError(
                "start_quorum(): a rank that comes is taken in, and gets the state of the others; "
                "phub has no allow_heal=False and no shrink_only=True"
            )
        if self._syncs and not self._functions:
            raise InvalidError(
                "start_quorum() before register_state_dict_fn(): there is no state to begin with. "
                "Register it, or say init_sync=False if all ranks begin with the same"
            )
        self.wait_quorum()
        if self._is_open and not (self._error or (self._batches and self._batches.has_some)):
            return  # it has begun, and nothing else
        if self._is_open:
            self._drop_batches()
            self._must_wait = True
        self._error, self._is_open = None, True
        if self._quorum is None:
            mine = {n: v for n, v in self._options.items() if n not in _OF_TENSORS}
            self._quorum = Quorum(mine)
        self._quorum.say(self._standing())
        self._is_asked = True
        if self._must_wait or not self._is_async:
            self.wait_quorum()

    def wait_quorum(self) -> None:
        """Returns when it is known which ranks take part in the step, and all have its state."""
        if not self._is_asked:
            return
        quorum = self._joined()
        given: torch.Tensor | None = None
        tries = 0
        while True:
            table = quorum.hear()
            course = course_of(table)
            if not course.behind:
                break
            if quorum.rank in course.behind and not self._functions:
                raise InvalidError(
                    "start_quorum(): this rank comes later than others, or lacks steps that they "
                    "have made, and there is no state to get: call register_state_dict_fn() on all "
                    "ranks"
                )
            offer = table[course.source].offer
            if offer:
                tries += 1
                self._heal(given if course.source == quorum.rank else offer, course, tries)
                given = None
            elif course.source == quorum.rank:
                given = _given_state.packed(self._whole_state())
            quorum.say(self._standing(offer=0 if given is None else len(given)))
        self._is_asked, self._must_wait, self._is_sound = False, False, True
        self._members = tuple(table)
        exchanges = {each.exchange for each in table.values()}
        if len(exchanges) > 1 or 0 in exchanges:
            self._exchange_anew(quorum.round)

    def allreduce(
        self,
        tensor: torch.Tensor,
        should_quantize: bool = False,  # noqa: FBT001, FBT002
        reduce_op: Any = None,
    ) -> Work:
        """The mean over the ranks that take part comes into the tensor, until its wait().

        In rank order, times float(1/n), as everywhere in phub: the same bits on all ranks. An error
        of the exchange is no exception: wait() is False, errored() has it, what follows in the
        step does nothing, and the step does not count. A tensor of another size than in the steps
        before is an InvalidError.
        """
        if should_quantize:
            raise InvalidError(
                "allreduce(should_quantize=True): say gradient_dtype='int8' to phub.Manager"
            )
        if reduce_op is not None and "AVG" not in str(reduce_op):
            raise InvalidError(
                f"allreduce({reduce_op}): phub.Manager averages, over the ranks that take part"
            )
        if self._error is not None:
            return Work(self, tensor, None)
        if not self._is_open:
            raise InvalidError("allreduce() before start_quorum(), which begins a step")
        self.wait_quorum()
        given: Given | None = None
        try:
            given = self._joined_batches().add(tensor)
        except errors.Error as error:
            self._note(error)
        return Work(self, tensor, given)

    def should_commit(self, timeout: timedelta | None = None) -> bool:  # noqa: ARG002
        """Ends a step: waits for its tensors, and says whether it counts. If so, make it.

        False: there was an error, or fewer ranks than min_replica_size at its beginning. A rank
        that alone has an error gets the state of the others in its next start_quorum(). Raises
        RuntimeError after max_retries.
        """
        if not self._is_open and self._error is None:
            raise InvalidError("should_commit() before start_quorum(), which begins a step")
        self.wait_quorum()
        self._is_open = False
        if self._error is None and self._batches:
            try:
                self._batches.end_step()
            except errors.Error as error:
                self._note(error)
        if self._error is not None:
            self._drop_batches()
        is_made = self._error is None and len(self._members) >= self._min
        if is_made:
            self._step += 1
            self._committed += len(self._members)
            self._failures = 0
            return True
        self._failures += 1
        self._must_wait = True
        if self._max_retries is not None and self._failures > self._max_retries:
            raise RuntimeError(
                f"should_commit(): {self._failures} steps in a row did not count, and max_retries "
                f"is {self._max_retries}. The latest: {self._error or 'too few ranks'}"
            )
        return False

    def errored(self) -> BaseException | None:
        """The error of this step; None: there is none."""
        return self._error

    def report_error(self, error: BaseException) -> None:
        """Says that the step of this rank does not count, whatever the others say."""
        self._error = self._error or error

    # ---- What it is.

    def current_step(self) -> int:
        """How many steps count so far."""
        return self._step

    def batches_committed(self) -> int:
        """The ranks that took part, added up over these steps."""
        return self._committed

    def num_participants(self) -> int:
        """The ranks that take part in this step, as they were found at its beginning."""
        self.wait_quorum()
        return len(self._members)

    def participating_rank(self) -> int | None:
        """The place of this rank among them, from 0; None: before the first step."""
        self.wait_quorum()
        return self._members.index(self._quorum.rank) if self._quorum and self._members else None

    def is_participating(self) -> bool:
        """Whether this rank is among them: from the first start_quorum() on."""
        return self.participating_rank() is not None

    @property
    def rank(self) -> int:
        """Which rank this is, from 0, whoever else is there. After the first start_quorum()."""
        return self._joined().rank

    # ---- State, for files of the program.

    def state_dict(self) -> dict[str, int]:
        """The step and the batches: save it beside the model."""
        return {"step": self._step, "batches_committed": self._committed}

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        """Goes on from there. Ranks that have come less far get the state of the others."""
        self._step = whole_number("step", state_dict["step"], 40)
        self._committed = whole_number("batches_committed", state_dict["batches_committed"], 63)
        self._must_wait = True

    # ---- The end.

    def shutdown(self, wait: bool = True) -> None:  # noqa: ARG002, FBT001, FBT002
        """Leaves: the others go on without this rank."""
        if self._batches:
            self._batches.close()
        if self._quorum:
            self._quorum.close()
        self._batches = self._quorum = None
        self._is_asked = self._is_open = False
        self._exchange, self._members, self._must_wait = 0, (), True

    def __enter__(self) -> Manager:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """With an exception it does not leave: to the others a rank that fails is lost."""
        if fails(kind, error):
            for each in (self._batches, self._quorum):
                if each:
                    each.abandon()
            self._batches = self._quorum = None
        self.shutdown()

    def __getattr__(self, name: str) -> NoReturn:
        why = _NO_METHOD.get(name)
        raise AttributeError(f"phub.Manager has no '{name}'" + (f": {why}" if why else ""))

    # ---- Inside.

    def _joined(self) -> Quorum:
        if self._quorum is None:
            raise InvalidError("phub.Manager joins in start_quorum(): call it before")
        return self._quorum

    def _joined_batches(self) -> Batches:
        if self._batches is None:
            raise InvalidError("allreduce() before start_quorum(), which begins a step")
        return self._batches

    def _standing(self, offer: int = 0) -> Standing:
        return Standing(self._step, int(self._is_sound), self._exchange, offer)

    def _whole_state(self) -> dict[str, Any]:
        user = {key: state() for key, (_, state) in self._functions.items()}
        return {"user": user, "manager": self.state_dict()}

    def _heal(self, given: Any, course: Any, tries: int) -> None:
        """Gives this rank's state to those that lack it, or gets it. Others only wait."""
        quorum = self._joined()
        ranks = (course.source, *course.behind)
        if quorum.rank not in ranks:
            return
        options = {n: v for n, v in self._options.items() if n not in (*_OF_RANKS, *_OF_TENSORS)}
        options["join_limit_ms"] = self._limit_ms
        name = f"{quorum.job}-state-{quorum.round}"
        try:
            words = _given_state.give(name, ranks, quorum.rank, given, **options)
        except errors.Error:
            if tries >= _TRIES and quorum.rank != course.source:
                raise
            return  # in the next round somebody gives it again
        if quorum.rank == course.source:
            self._is_sound = True
            return
        state = _given_state.unpacked(words)
        if state["user"].keys() != self._functions.keys():
            raise InvalidError(
                f"register_state_dict_fn: rank {course.source} gives {sorted(state['user'])}, and "
                f"this rank has {sorted(self._functions)}: register the same on all ranks"
            )
        for key, (load, _) in self._functions.items():
            load(state["user"][key])
        self.load_state_dict(state["manager"])
        self._is_sound = True

    def _exchange_anew(self, number: int) -> None:
        """With the ranks of now. Jobs of their own: in those that are there nobody could join."""
        if self._batches:
            self._batches.close()
        quorum = self._joined()
        options = {n: v for n, v in self._options.items() if n not in _OF_RANKS}
        options |= {"rank": self._members.index(quorum.rank), "world_size": len(self._members)}
        options |= {"min_ranks": 0, "max_ranks": 0, "join_limit_ms": self._limit_ms}
        options = {"on_nonfinite": "pass", **options}
        self._exchange = number
        self._batches = Batches(f"{quorum.job}-{number}", options)

    def _take(self, given: Given | None) -> bool:
        if given and self._error is None and given.of is self._batches:
            try:
                given.of.take(given)
            except errors.Error as error:
                self._note(error)
        return self._error is None

    def _note(self, error: errors.Error) -> None:
        """Of a lost rank or box the step is lost; what the program does wrong is raised."""
        if isinstance(error, (InvalidError, MismatchError)):
            raise error
        self.report_error(error)

    def _drop_batches(self) -> None:
        """The ranks make new ones; in these, this rank is lost to those that still wait."""
        if self._batches:
            self._batches.abandon()
        self._batches, self._exchange = None, 0
