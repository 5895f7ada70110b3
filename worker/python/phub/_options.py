"""The options of a worker and the keys of its job, as the library takes them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from ctypes import Array, c_uint64, c_void_p
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Union

from phub import errors
from phub._library import Range, call
from phub._numbers import real_number, signed_number, whole_number

Option = Union[str, int, float, bool]
MAX_DIMENSIONS = 8  # of a key's shape, as worker/phub.h has it
MAX_ROWS = 2**20 - 1  # a key's rows_limit, the same


@dataclass(frozen=True)
class Key:
    """A key of the model: `elements` numbers that are exchanged as one.

    Keys with a higher `priority` overtake others that wait. `lr_scale` and `decay_scale` multiply
    the job's learning rate and weight decay. `shape`, which checkpoints have, is 1 to
    MAX_DIMENSIONS dimensions, the last varying fastest, whose product is `elements`; (): none.
    `group`, 0 to 255: hyperparameters of a name such as "lr@2" are those of group 2.
    `fragment`, 0 to 255, without gaps: in a job with a quorum a rank takes part in a round of a
    fragment with all of its keys or with none, and ranks may be at different fragments.
    `rank_limit`: of a key whose shape is (rows, columns), so many pairs of vectors at most are sent
    in place of its gradient, with `Worker.push_factors`; 0: the gradient.
    `rows_limit`: of such a key, so many different rows of its gradient at most are sent, with
    `Worker.push_rows`: those that are not zero; 0: all. `lazy`: the optimizer's step of a round
    changes the rows that a rank sent, and leaves alone parameters and state of the others.
    With both limits, `rows_limit` is all rows, and each push is `push_rows` or `push_factors`.
    `operation`, of a job with the optimizer "fold" or "none": "add", "multiply", "min", "max" or
    "or" is done with the values, of `value_type` "f32", "f64", "i32" or "i64"; `elements` are words
    of 4 bytes, two of them a value of 64 bits.
    `writes`, `reads`: what this rank touches of the key, as ranges of its elements (first, end);
    None for both: all. Where only one is given, the other is nothing. Ranks may give other ranges.
    """

    elements: int
    priority: int = 0
    lr_scale: float = 1.0
    decay_scale: float = 1.0
    shape: tuple[int, ...] = ()
    group: int = 0
    fragment: int = 0
    rank_limit: int = 0
    rows_limit: int = 0
    lazy: bool = False
    operation: str = ""
    value_type: str = ""
    writes: Sequence[tuple[int, int]] | None = None
    reads: Sequence[tuple[int, int]] | None = None


# Options that are numbers with a fraction.
WITH_FRACTION = ("late_decay",)
# Other ranks wait while rank 0 validates: as long as in torch.distributed. In C it is a minute.
PROGRESS_LIMIT_MS = 600_000


def set_options(options: c_void_p, given: Mapping[str, Option]) -> None:
    for given_name, value in {"progress_limit_ms": PROGRESS_LIMIT_MS, **given}.items():
        # DistributedOptimizer has an argument `server`, which is no address.
        name = "server" if given_name == "box" else given_name
        if isinstance(value, str) or (isinstance(value, float) and name in WITH_FRACTION):
            call("options_set", options, name.encode(), str(value).encode())
        else:
            number = signed_number(f"option '{given_name}'", value, 64)
            call("options_set_number", options, name.encode(), number)


# What a job must have for its results to be those of the ranks' gradients, in every form, and why.
_FOR_STEPS = {
    "consistency": ("bsp", "a step is a round of all ranks, in lock-step"),
    "work": ("all", "other work is for benchmarks: the box would not compute what the ranks need"),
}
# The same where results are gradients: the box has no model then.
_FOR_GRADIENTS = {
    **_FOR_STEPS,
    "optimizer": ("none", "a step of the box would hand back parameters in place of gradients"),
    "unused": ("zero", "what the box skips keeps the result of the round before"),
    "quorum": ("0", "a rank that is late would lack gradients that the others have applied"),
}


def check_results(
    form: str, options: Mapping[str, Option], *, gradients: bool = True, **fixed: str
) -> None:
    """Raises InvalidError for an option of `Worker` with which results would not be the form's.

    form: what the program calls, for messages.
    gradients: whether results are gradients, and not parameters after a step of the box.
    fixed: options that the form chooses itself, with the only value that may be given.
    """
    rules = {
        **(_FOR_GRADIENTS if gradients else _FOR_STEPS),
        **{name: (value, f"{form} chooses it itself") for name, value in fixed.items()},
    }
    for name, (only, why) in rules.items():
        if str(options.get(name, only)) != only:
            raise errors.InvalidError(
                f"{form} with {name}={options[name]!r}: {why}. Leave {name} out, or say {only!r}"
            )
    if gradients and options.get("on_nonfinite") == "skip":
        raise errors.InvalidError(
            f"{form} with on_nonfinite='skip': a round that is skipped keeps the gradients of the "
            "round before. Say 'pass', 'stop' or 'exclude', and let the program leave out the step"
        )


def check_formats(
    formats: Mapping[str, str], keys: Mapping[str, Key], others: Mapping[str, str]
) -> None:
    """Raises NotFoundError for a pattern that matches none of the keys, but some of `others`.

    others: parameters that are no keys, and what they are exchanged as.
    """
    for pattern, name in formats.items():
        matching = [other for other in others if fnmatchcase(other, pattern)]
        if matching and not any(fnmatchcase(key, pattern) for key in keys):
            raise errors.NotFoundError(
                f"formats: '{pattern}' is to be sent as {name!r}, but it matches "
                f"'{matching[0]}'{' and others' if matching[1:] else ''} alone, whose gradients go "
                f"as {others[matching[0]]}, in float32. Leave the pattern out"
            )


def set_formats(options: c_void_p, formats: Mapping[str, str]) -> None:
    """After `add_keys`. Raises InvalidError or NotFoundError, which name the format or pattern."""
    for pattern, name in formats.items():
        call("options_set_format", options, pattern.encode(), name.encode())


def add_keys(options: c_void_p, keys: Mapping[str, int | Key]) -> None:
    for index, (name, given) in enumerate(keys.items()):
        key = given if isinstance(given, Key) else Key(given)
        _check_key(name, key)
        _add_key(options, name, key)
        call("options_tune_key", options, index, key.priority, key.lr_scale, key.decay_scale)
        call("options_set_group", options, index, key.group)
        if key.fragment:
            call("options_set_fragment", options, index, key.fragment)
        if key.rank_limit:
            call("options_set_rank_limit", options, index, key.rank_limit)
        if key.rows_limit:
            call("options_set_rows_limit", options, index, key.rows_limit, int(key.lazy))
        if key.operation or key.value_type:
            words = (key.operation.encode(), key.value_type.encode())
            call("options_set_operation", options, index, *words)
        if key.writes is not None or key.reads is not None:
            writes, reads = _ranges(name, key.writes), _ranges(name, key.reads)
            call("options_set_interest", options, index, writes, len(writes), reads, len(reads))


def _check_key(name: str, key: Key) -> None:
    """Its numbers: C would take others for them."""
    whole_number(f"key '{name}': the number of elements", key.elements, 64)
    if key.elements < 1:
        raise errors.InvalidError(f"key '{name}' has {key.elements} elements: at least 1")
    for size in key.shape:
        whole_number(f"key '{name}': a dimension of its shape", size, 64)
    signed_number(f"key '{name}': priority", key.priority, 32)
    for what in ("lr_scale", "decay_scale"):
        real_number(f"key '{name}': {what}", getattr(key, what))
    for what in ("group", "fragment", "rank_limit", "rows_limit"):
        whole_number(f"key '{name}': {what}", getattr(key, what), 32)
    if key.lazy and not key.rows_limit:
        raise errors.InvalidError(
            f"key '{name}': lazy is for a key of which rows are sent: give it a rows_limit, too"
        )


def _ranges(name: str, given: Sequence[tuple[int, int]] | None) -> Array[Range]:
    for first, end in given or ():
        for at in (first, end):
            signed_number(f"key '{name}': an end of a range", at, 64)
        if not 0 <= first < end:
            raise errors.InvalidError(f"the range ({first}, {end}) is empty, or begins before 0")
    return (Range * len(given or ()))(*(Range(*one) for one in given or ()))


def _add_key(options: c_void_p, name: str, key: Key) -> None:
    if not key.shape:
        call("options_add_key", options, name.encode(), key.elements)
        return
    if min(key.shape) < 1 or math.prod(key.shape) != key.elements:
        raise errors.InvalidError(
            f"key '{name}': the product of the shape {key.shape} must be the number of elements, "
            f"which is {key.elements}"
        )
    shape = (c_uint64 * len(key.shape))(*key.shape)
    call("options_add_shaped_key", options, name.encode(), shape, len(shape))
