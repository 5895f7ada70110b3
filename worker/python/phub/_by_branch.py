"""What a rank has for itself, of each branch of its job."""

from __future__ import annotations

import json
from collections.abc import Callable

from phub.worker import Worker


class ByBranch:
    """Keeps a rank's own state of each branch: saved when another runs, given back when it does.

    What is the rank's own are the statistics of batch normalisation, random numbers, where its data
    go on, and the like: all that the box does not have. A child has what its parent had when it was
    forked. In memory, of each branch but the one that runs; branches that have the same share it.

        own = ByBranch(save, load)
        for batch in data:
            own.begin(worker)  # before anything of the round

    A rank that comes later than a fork begins the child with what it has; so it is with a child
    that is forked, scheduled and discarded at once.
    """

    def __init__(self, save: Callable[[], bytes], load: Callable[[bytes], object]) -> None:
        """save: returns the state; load: is given what it returned, and makes it as it was."""
        self._save, self._load = save, load
        self._branch = 0  # whose state is in place
        self._next = 1  # forks before earlier rounds are known
        self._waiting: dict[int, bytes] = {}

    def begin(self, worker: Worker, round: int = 0) -> int:  # noqa: A002
        """Before this rank begins a round (0: its next) whose predecessor's results are all here.

        With overlap="forward" synchronize() before. Returns the branch that runs in it. Call it
        before each round, or before none; again for the same round it does nothing.
        """
        runs = worker.branch_runs()  # once what is under way on a device is there
        round_ = round or worker.round(worker.keys[0]) + 1
        there = {each.branch: each for each in worker.branches()}
        states = dict(self._waiting)
        now = [branch for at, branch in runs if at <= round_][-1]
        children = sorted(of for of, each in there.items() if self._next <= each.round <= round_)
        if now != self._branch or any(there[of].parent == self._branch for of in children):
            states[self._branch] = self._save()
        for child in children:
            if (parent := there[child].parent) in states:
                states[child] = states[parent]
        if now != self._branch and now in states:
            self._load(states[now])
        states.pop(now, None)
        self._branch = now
        # A branch whose end is decided may have turns and children until then.
        needed = there.keys() | {branch for at, branch in runs if at > round_}
        needed |= {each.parent for each in there.values() if each.round > round_}
        self._waiting = {of: state for of, state in states.items() if of in needed}
        self._next = round_ + 1
        return now

    def saved(self) -> bytes:
        """For a checkpoint: all but the state that is in place."""
        places: dict[int, int] = {}
        states: list[bytes] = []
        for state in self._waiting.values():
            if id(state) not in places:
                places[id(state)] = len(states)
                states.append(state)
        head = {
            "branch": self._branch,
            "next": self._next,
            "waiting": [(of, places[id(state)]) for of, state in self._waiting.items()],
            "bytes": [len(state) for state in states],
        }
        return b"\n".join((json.dumps(head).encode(), b"".join(states)))

    def restore(self, saved: bytes) -> None:
        """As it was when it was saved; what was in place then is the program's to give back."""
        text, _, content = saved.partition(b"\n")
        head = json.loads(text)
        states, at = [], 0
        for size in head["bytes"]:
            states.append(content[at : at + size])
            at += size
        self._branch, self._next = head["branch"], head["next"]
        self._waiting = {of: states[place] for of, place in head["waiting"]}
