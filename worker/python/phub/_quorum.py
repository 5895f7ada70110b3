"""What the ranks of a Manager tell each other in each step, in a small job of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

import torch

from phub._options import Key, Option
from phub._views import tensor_over
from phub.errors import InvalidError
from phub.worker import Worker

MOST_RANKS = 256
_KEY = "ranks"
_DIGIT = 1 << 20  # a float32 has whole numbers up to 2^24 exactly


@dataclass(frozen=True)
class Standing:
    """What a rank says of itself. All ranks get the same ones, and so decide the same."""

    step: int
    is_sound: int = 0  # 1: its state is that of its step, and may be given to others
    exchange: int = 0  # the round in which the ranks that it exchanges with were found; 0: none
    offer: int = 0  # words of state that it gives to others now; 0: none


_COLUMNS = 1 + 2 * len(fields(Standing))  # a 1, and of each number two digits


class Quorum:
    """A job whose only key is a table: a row for each rank, which that rank alone fills."""

    def __init__(self, options: Mapping[str, Option]) -> None:
        """Joins. Returns when all ranks of the beginning have; late: at the next round."""
        for name in ("world_size", "max_ranks"):
            if int(options.get(name, 0)) > MOST_RANKS:
                raise InvalidError(
                    f"Manager with {name}={options[name]}: it is for {MOST_RANKS} ranks at most. "
                    "Let the processes of a host be one rank"
                )
        keys = {_KEY: Key(MOST_RANKS * _COLUMNS, shape=(MOST_RANKS, _COLUMNS))}
        self._worker = Worker(
            keys, hyper=None, formats=None, saver=None, reduction="sum", **options
        )
        self.rank, self.job = self._worker.rank, self._worker.job
        if self.rank >= MOST_RANKS:
            self.close()
            raise InvalidError(f"Manager: rank {self.rank} of at most {MOST_RANKS}")

    @property
    def round(self) -> int:
        """In which the table was made that was heard last."""
        return self._worker.round(_KEY)

    def say(self, standing: Standing) -> None:
        """Begins a round. It ends when all ranks have said theirs, or are lost."""
        table = tensor_over(self._worker.gradient(_KEY)).view(MOST_RANKS, _COLUMNS)
        table.zero_()
        table[self.rank] = torch.tensor(_row_of(standing), dtype=torch.float32)
        self._worker.push(_KEY)

    def hear(self) -> dict[int, Standing]:
        """Of all ranks that took part in the round, by ascending ranks."""
        self._worker.wait(_KEY)
        table = tensor_over(self._worker.parameters(_KEY)).view(MOST_RANKS, _COLUMNS)
        rows = [(int(at), table[at].tolist()) for at in table[:, 0].nonzero().flatten()]
        return {rank: _standing_of(row) for rank, row in rows}

    def close(self) -> None:
        """Leaves the job: the others go on without this rank."""
        self._worker.close()

    def abandon(self) -> None:
        """To the others this rank is lost."""
        self._worker.abandon()


def _row_of(standing: Standing) -> list[float]:
    row = [1.0]
    for field in fields(standing):
        row.extend(divmod(getattr(standing, field.name), _DIGIT))
    return row


def _standing_of(row: list[float]) -> Standing:
    digits = [int(number) for number in row[1:]]
    return Standing(*(a * _DIGIT + b for a, b in zip(digits[::2], digits[1::2], strict=True)))


@dataclass(frozen=True)
class Course:
    """What follows from a table: who gives its state to whom."""

    source: int  # the rank
    step: int  # that its state is of
    behind: tuple[int, ...]  # the ranks that need it


def course_of(table: Mapping[int, Standing]) -> Course:
    """The lowest of the sound ranks that have come the farthest; of all, if none is sound."""
    sound = {rank: each for rank, each in table.items() if each.is_sound} or table
    step = max(each.step for each in sound.values())
    ahead = [rank for rank in sorted(sound) if sound[rank].step == step]
    has_it = ahead if sound is not table else ahead[:1]
    return Course(ahead[0], step, tuple(rank for rank in sorted(table) if rank not in has_it))
