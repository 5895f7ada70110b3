"""The parameters of GPT-2 small, as the programs of bench/outer exchange them; without computing."""

LAYERS, WIDTH, WORDS, POSITIONS = 12, 768, 50257, 1024


def shapes(parts):
    """Those of the first 1/parts of the layers, with as large a part of the words."""
    norm = [(WIDTH,), (WIDTH,)]
    attention = [(WIDTH, 3 * WIDTH), (3 * WIDTH,), (WIDTH, WIDTH), (WIDTH,)]
    fully = [(WIDTH, 4 * WIDTH), (4 * WIDTH,), (4 * WIDTH, WIDTH), (WIDTH,)]
    layer = norm + attention + norm + fully
    return [(WORDS // parts, WIDTH), (POSITIONS, WIDTH)] + layer * max(1, LAYERS // parts) + norm


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
