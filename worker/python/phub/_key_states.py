"""The state of keys at the box, and a rank's own, between rounds."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Mapping, Sequence
from ctypes import byref, c_char_p, c_size_t, c_uint64, c_void_p
from typing import Any

from phub import errors
from phub._calls import Calls, round_number
from phub._library import call
from phub._numbers import whole_number
from phub._waiting import waiting_call


class StateCalls(Calls):
    """The state at the box. TakenError: another rank reads or sets it."""

    @property
    def state_names(self) -> tuple[str, ...]:
        """What the optimizer keeps of a key: "exp_avg", "exp_avg_sq" … beside its parameters."""
        names: list[str] = []
        found = c_char_p()
        with contextlib.suppress(errors.NotFoundError):
            while True:
                call("state_name", self._worker, len(names), byref(found))
                names.append((found.value or b"").decode())
        return tuple(names)

    def get_state(self, into: Mapping[str, Sequence[Any]]) -> dict[str, int]:
        """Copies the state of these keys: of each the parameters, then what `state_names` says.

        Each array is a contiguous float32 buffer or a `Memory`. Returns the optimizer's steps of
        each key. For jobs in lock-step, when this rank has all results and has pushed no key since.
        """
        self._settle()
        steps = (c_uint64 * len(into))()
        indices, arrays = self._state_arrays(into)
        waiting_call("get_state", self._worker, indices, len(into), arrays, steps, None)
        return dict(zip(into, steps, strict=True))

    def set_state(self, arrays: Mapping[str, Sequence[Any]], steps: Mapping[str, int]) -> int:
        """Sets the state of these keys for all ranks, as `get_state` gets it; one rank calls it.

        Returns the round from which on the optimizer works on it.
        """
        self._settle()
        numbers = (c_uint64 * len(arrays))(
            *(whole_number(f"the steps of key '{key}'", steps[key], 64) for key in arrays)
        )
        indices, addresses = self._state_arrays(arrays)
        at = c_uint64()
        waiting_call("set_state", self._worker, indices, len(arrays), addresses, numbers, byref(at))
        return at.value

    # ---- This rank's own state, if the worker was made with a saver.

    def restored(self, name: str) -> bytes | None:
        """What the saver saved after the round before `first_round`, if the job goes on from there.

        None: there is nothing of this name; the job begins, or this rank joined it in progress.
        """
        found, size = c_void_p(), c_size_t()
        try:
            call("restored", self._worker, name.encode(), byref(found), byref(size))
        except errors.NotFoundError:
            return None
        return ctypes.string_at(found, size.value)

    def save_point(self, round: int) -> None:  # noqa: A002
        """After `round`, when the state is whole: from now on only this calls the saver."""
        self._settle()
        waiting_call("save_point", self._worker, round_number(round))

    def _state_arrays(self, given: Mapping[str, Sequence[Any]]) -> tuple[Any, Any]:
        needed = 1 + len(self.state_names)
        for key, arrays in given.items():
            if len(arrays) != needed:
                raise errors.InvalidError(
                    f"key '{key}': the state is {needed} arrays (parameters, "
                    f"{', '.join(self.state_names)}), not {len(arrays)}"
                )
        addresses = [self._memory(key, a, "f32").address for key in given for a in given[key]]
        indices = (c_size_t * len(given))(*(self._at(key) for key in given))
        return indices, (c_void_p * len(addresses))(*addresses)
