"""The state of a rank, given to others over the box, in a job of its own that ends with it."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from phub._memory import Memory
from phub._options import Key, Option
from phub._views import tensor_over
from phub.errors import InvalidError
from phub.worker import Worker

_KEY = "state"
_WORD = 4  # bytes of an element, whose bits nobody changes: they are not added to anything


def packed(state: Mapping[str, Any]) -> torch.Tensor:
    """As words, with zeros behind them."""
    content = io.BytesIO()
    torch.save(state, content)
    size = len(content.getvalue())
    raw = bytearray(content.getvalue()) + bytes(-size % _WORD)
    return torch.frombuffer(raw, dtype=torch.float32)


def unpacked(words: torch.Tensor) -> dict[str, Any]:
    """Runs no code, whatever the bytes are. Raises InvalidError."""
    content = io.BytesIO(words.view(torch.uint8).numpy().tobytes())
    try:
        state = torch.load(content, map_location="cpu", weights_only=True)
        is_state = isinstance(state, dict) and all(
            isinstance(state.get(part), dict) for part in ("user", "manager")
        )
        if not is_state:
            raise pickle.UnpicklingError("it is no state")  # noqa: TRY301
    except (pickle.UnpicklingError, RuntimeError, ValueError, LookupError, EOFError) as error:
        raise InvalidError(
            "register_state_dict_fn: what another rank gives must be numbers, strings, tensors, "
            f"and lists, tuples and dicts of these: {error}"
        ) from None
    found: dict[str, Any] = state
    return found


def give(
    job: str, ranks: Sequence[int], rank: int, given: torch.Tensor | int, **options: Option
) -> torch.Tensor:
    """The words of the first of these ranks, which calls it with them; all others say how many.

    All of them call it. Raises Error: one of them did not come, or the first is lost.
    """
    words = len(given) if isinstance(given, torch.Tensor) else given
    worker = Worker(
        {_KEY: Key(words)},
        hyper=None,
        formats=None,
        saver=None,
        job=job,
        rank=list(ranks).index(rank),
        initial="broadcast",
        on_nonfinite="pass",
        **{**options, "world_size": len(ranks), "min_ranks": 0, "max_ranks": 0},
    )
    with worker:
        if isinstance(given, torch.Tensor):
            memory = Memory(given.data_ptr(), words * _WORD, given)
            worker.broadcast({_KEY: memory})
            worker.barrier()  # nobody leaves before all have it
            return given
        worker.broadcast()
        found = tensor_over(worker.parameters(_KEY)).clone()
        worker.barrier()
        return found
