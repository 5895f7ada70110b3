"""Which samples of the data a rank takes, and where it goes on after a restart."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sized
from typing import Any

import torch

from phub._order import Order
from phub.errors import InvalidError

_MOST_SAMPLES = 1 << 62
_END = object()


class Sampler(torch.utils.data.Sampler[int]):
    """A rank's part of the data, in a new order every epoch, as `DataShards` of C++ has it.

    It takes the place of DistributedSampler in a DataLoader, and can go on in the middle of an
    epoch: give it to `DistributedOptimizer.steps`, or save its `state_dict`. For that take the
    batches from `batches`, which counts those that the program got. (The loader is ahead: its
    worker processes prefetch.)

    Shared data: the n-th sample of an epoch's order goes to rank n % world_size. The state counts
    what all ranks together have taken, so it can be loaded with another world size: the rest of the
    epoch is dealt out to the new ranks, and no sample comes twice or is left out. All ranks take
    batches of the same size in the same step.
    """

    def __init__(
        self,
        data: Sized,
        *,
        rank: int,
        world_size: int,
        private: bool = False,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
    ) -> None:
        """Begins with the first sample of epoch 0.

        data: has the samples: those of all ranks, or, if private, of this rank alone. Private data
            may have a different number of samples on each rank; epochs are the rank's own.
        seed: of the orders, 0 to 2**64 - 1; for shared data the same on all ranks.
        shuffle: False: every epoch is in the order of the samples' numbers.
        drop_last: what becomes of the end of an epoch that the ranks do not divide. False: the
            first samples of its order come once more. True: the last ones are left out.
        Raises InvalidError.
        """
        samples = len(data)
        if not 0 < samples <= _MOST_SAMPLES:
            raise InvalidError(f"the data has {samples} samples: there must be 1 to 2**62")
        if not 0 <= rank < world_size:
            raise InvalidError(f"rank {rank} of the data is outside of the world of {world_size}")
        if not 0 <= seed < 1 << 64:
            raise InvalidError(f"the seed of the data is {seed}: it must be 0 to 2**64 - 1")
        self._samples, self._rank, self._private = samples, rank, private
        self._seed, self._shuffle, self._drop_last = seed, shuffle, drop_last
        self._stride, self._offset = (1, 0) if private else (world_size, rank)
        if drop_last and samples < self._stride:
            raise InvalidError(
                f"{samples} samples are too few for {world_size} ranks with drop_last: every epoch "
                "would be empty"
            )
        self._at = 0, 0  # epoch and position of the next sample
        self._counting = False  # batches() asks for the samples
        self._uncounted = False  # somebody else did

    @property
    def epoch(self) -> int:
        """Of the next sample, from 0: the last batch of an epoch begins the next one."""
        return self._at[0]

    @property
    def left(self) -> int:
        """How many samples this rank has still to take in this epoch, at least 1."""
        return self._left_at(self._at[1])

    def __len__(self) -> int:
        """How many samples this rank takes in a whole epoch."""
        return self._left_at(0)

    def __iter__(self) -> Iterator[int]:
        """The rest of the epoch. Does not count what is taken: `batches` does."""
        self._uncounted = not self._counting
        return self._rest()

    def batches(
        self, loader: torch.utils.data.DataLoader[Any], until: int | None = None
    ) -> Iterator[Any]:
        """The loader's batches, epoch after epoch, until epoch `until` begins, or without end.

        The loader has this sampler. A batch counts as taken when the program gets it: with
        `steps()` ask for a step's batch within the step. After load_state_dict(), set_epoch() and
        skip() the next batch is the one from there, also of an iterator that exists already.
        """
        if loader.sampler is not self:
            raise InvalidError("the DataLoader has another sampler: make it with sampler=this one")
        if not getattr(loader, "in_order", True):
            raise InvalidError(
                "a DataLoader with in_order=False cannot go on after a restart: which batches were "
                "taken is not known"
            )
        return self._batches(loader, until)

    def next(self, samples: int) -> list[int]:
        """The numbers of the next samples, fewer at an epoch's end, for a program without a loader.

        So batches may have another size each time, on all ranks the same, as where a branch of the
        job has its own: next(worker.batch_in(round) or 32).
        """
        if samples < 1:
            raise InvalidError(f"{samples} samples cannot be taken: there must be at least 1")
        taken = list(itertools.islice(self._rest(), samples))
        self.skip(1, samples)
        return taken

    def _batches(
        self, loader: torch.utils.data.DataLoader[Any], until: int | None
    ) -> Iterator[Any]:
        size = 1 if loader.batch_size is None else loader.batch_size
        while until is None or self.epoch < until:
            begun = here = self._at
            batches = None
            while self._at == here:
                self._counting = True
                try:
                    batches = iter(loader) if batches is None else batches
                    batch = next(batches, _END)
                finally:
                    self._counting = False
                if batch is _END:
                    self._end_epoch(begun, size)
                    break
                self.skip(1, size)
                here = self._at
                yield batch

    def _end_epoch(self, begun: tuple[int, int], size: int) -> None:
        """The loader has no more batches; it began here."""
        if self._at[0] != begun[0]:
            return
        if self._at[1] == 0:
            raise InvalidError(
                f"an epoch has {len(self)} samples for this rank, and the DataLoader makes no "
                f"batch of them: it has drop_last=True and batches of {size}"
            )
        self._begin(begun[0] + 1)  # the loader has dropped the rest

    def skip(self, batches: int, batch_size: int) -> None:
        """Goes on as if the program had got so many batches of this size.

        For a rank without a saved state, in a job in progress: skip(optimizer.steps_done, 32). A
        program with a loader of its own calls skip(1, 32) for every batch that it takes.
        """
        if batches < 0 or batch_size < 1:
            raise InvalidError(f"{batches} batches of {batch_size} samples cannot be skipped")
        self._uncounted = False
        epoch, position = self._at
        batches_left = -(-self.left // batch_size)
        if batches < batches_left:
            self._at = epoch, position + batches * batch_size * self._stride
            return
        epochs, batches = divmod(batches - batches_left, -(-len(self) // batch_size))
        self._at = epoch + 1 + epochs, batches * batch_size * self._stride

    def set_epoch(self, epoch: int) -> None:
        """Goes on with the first sample of this epoch; in the middle of it, nothing changes."""
        if epoch < 0:
            raise InvalidError(f"there is no epoch {epoch}: they count from 0")
        if epoch != self.epoch:
            self._begin(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Where it is, and of which data. Raises RuntimeError if that is not known."""
        if self._uncounted:
            raise RuntimeError(
                "the sampler does not know which of the samples that it gave to the DataLoader "
                "were taken: iterate over sampler.batches(loader) in place of the loader"
            )
        epoch, position = self._at
        return {**self._data(), "epoch": epoch, "position": position}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Goes on from there with the same samples; shared data may have another world size.

        Raises InvalidError, which names what differs, if it is the state of other data.
        """
        mine = self._data()
        if state_dict.keys() != {*mine, "epoch", "position"}:
            raise InvalidError(f"{sorted(state_dict)} are not what a phub.Sampler saved")
        for name, value in mine.items():
            if state_dict[name] != value:
                raise InvalidError(
                    f"the state is of other data: its {name} is {state_dict[name]}, and that of "
                    f"this data is {value}. Give the same arguments as before, or begin anew"
                )
        epoch, position = state_dict["epoch"], state_dict["position"]
        if not (isinstance(epoch, int) and isinstance(position, int)):
            raise InvalidError(f"epoch {epoch!r} and position {position!r} are no numbers")
        if epoch < 0 or not 0 <= position < self._samples:
            raise InvalidError(f"there is no position {position} in epoch {epoch} of this data")
        self._begin(epoch, position)
        if self.left == 0:  # fewer than there are ranks now
            self._begin(epoch + 1)

    def _data(self) -> dict[str, Any]:
        return {
            "partition": "private" if self._private else "shared",
            "samples": self._samples,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "drop_last": self._drop_last,
            "rank": self._rank if self._private else 0,
        }

    def _begin(self, epoch: int, position: int = 0) -> None:
        self._at = epoch, position
        self._uncounted = False

    def _left_at(self, position: int) -> int:
        of_all = self._samples - position
        return of_all // self._stride if self._drop_last else -(-of_all // self._stride)

    def _rest(self) -> Iterator[int]:
        epoch, position = self._at
        stream = 1 + self._rank if self._private else 0
        order = Order(self._samples, self._seed, epoch, stream)
        begin = position + self._offset
        for at in range(begin, begin + self._left_at(position) * self._stride, self._stride):
            number = at % self._samples
            yield order[number] if self._shuffle else number
