"""The parameters of GPT-2, as the programs of bench/outer exchange them; without computing."""

import os

WORDS, POSITIONS = 50257, 1024
SIZES = {"small": (12, 768), "medium": (24, 1024)}  # layers and width: 498 MB and 1.42 GB


def shapes(parts):
    """Those of the first 1/parts of the layers, with as large a part of the words.

    OUTER_MODEL of the environment says of which size the model is, by default small.
    """
    layers, width = SIZES[os.environ.get("OUTER_MODEL", "small")]
    norm = [(width,), (width,)]
    attention = [(width, 3 * width), (3 * width,), (width, width), (width,)]
    fully = [(width, 4 * width), (4 * width,), (4 * width, width), (width,)]
    layer = norm + attention + norm + fully
    return [(WORDS // parts, width), (POSITIONS, width)] + layer * max(1, layers // parts) + norm


def step_of(rank):
    """What a learner adds to each of its parameters in a round."""
    return float(2 * rank + 1)


def check(arrays, rounds, ranks):
    """Raises ValueError unless all began with 0 and have moved by the mean of the steps in each round."""
    want = rounds * ranks  # the mean of 1, 3, …, 2 ranks - 1 is ranks
    for array in arrays:
        low, high = float(array.min()), float(array.max())
        if not (abs(low - want) < 1e-3 * want and abs(high - want) < 1e-3 * want):
            raise ValueError(f"after round {rounds} a parameter is {low} to {high} in place of {want}")
