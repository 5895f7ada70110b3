"""The order of an epoch's samples: bit for bit that of worker/data_shards.h."""

from __future__ import annotations

_ROUNDS = 8
_LEAST_BITS = 6  # with fewer, not all orders are as likely
_MASK = (1 << 64) - 1


def _mix(state: int) -> int:
    """One step of SplitMix64."""
    state = (state + 0x9E3779B97F4A7C15) & _MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return state ^ (state >> 31)


class Order:
    """A pseudorandom permutation of 0 to samples - 1, which takes no memory."""

    def __init__(self, samples: int, seed: int, epoch: int, stream: int) -> None:
        self._samples = samples
        bits = max(_LEAST_BITS, (samples - 1).bit_length())
        self._low_bits = bits // 2
        self._low_mask = (1 << self._low_bits) - 1
        self._high_mask = (1 << (bits - self._low_bits)) - 1
        key = _mix(_mix(_mix(seed) + epoch) + stream)
        keys = [_mix(key + number) for number in range(_ROUNDS)]
        self._keys = list(zip(keys[::2], keys[1::2], strict=True))

    def __getitem__(self, number: int) -> int:
        """The sample at a place: a Feistel network, until it comes to a sample's number."""
        while True:
            low, high = number & self._low_mask, number >> self._low_bits
            for first, second in self._keys:
                high ^= _mix(low + first) & self._high_mask
                low ^= _mix(high + second) & self._low_mask
            number = high << self._low_bits | low
            if number < self._samples:
                return number
