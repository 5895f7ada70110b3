"""What a worker tells of itself and its rounds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Stats:
    """Counters of a worker since its start."""

    pushes: int
    chunks_pushed: int
    chunks_received: int
    bytes_copied: int  # between the caller's memory and the library's
    sleeps: int  # how often a wait slept
    reconnections: int
    chunks_carried_over: int  # to the next round


@dataclass(frozen=True)
class Branch:
    """A branch of a job that has several."""

    branch: int  # its number; 0 is what the job began as
    parent: int
    round: int  # that it was forked before; 0: it was not
    rounds: int  # that it has run, its parent's up to there included
    runs: bool  # in the round that is in progress
    killed: bool = False
    on_disk: bool = False  # it is killed, and there is room for another
    batch: int = 0  # its hyperparameter `batch`, samples; 0: none is set


@dataclass(frozen=True)
class Verdict:
    """What became of a gated round, on all ranks."""

    round: int
    norm: float  # of the gradient of all keys, before it was clipped
    skipped: bool  # it is not finite, and changed nothing
