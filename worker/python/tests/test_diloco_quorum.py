"""DiLoCo whose rounds go on without late ranks, fragment by fragment, compared to the bit."""

import random
import time

import pytest
from conftest import SEED
from exact import assert_same_bits
from late_oracle import LateOracle
from test_diloco import made, make_step, net_of, now

ROUNDS = 12
HOW = {
    "streaming": {"sync_every": 6, "fragments": 3, "delay": 2, "alpha": 0.25},
    "at-once": {"sync_every": 4, "fragments": 2},
    "int8": {"sync_every": 3, "fragments": 3, "delta": "int8"},
    "decays": {"sync_every": 4, "fragments": 2, "late_decay": 0.5, "delay": 1},
}


def trains(rank, how, options):
    """Every rank is slow now and then, but rank 0. Returns its steps and parameters."""
    net = net_of(rank, how)
    chance = random.Random(f"{SEED}-{rank}")
    outer, inner = made(net, how, **options)
    keys = [key.name for key in outer._keys]
    step = 0
    while min(outer.worker.round(key) for key in keys) < ROUNDS:
        if rank > 0 and chance.random() < 0.15:
            time.sleep(chance.random() * 0.05)
        make_step(net, inner, rank, step)
        step += 1
    outer.close()
    return step, now(net)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize(
    ("name", "ranks", "quorum"),
    [
        ("streaming", 3, 2),
        ("at-once", 2, 1),
        ("int8", 4, 2),
        ("decays", 3, 2),
        ("at-once", 4, 3),
    ],
)
def test_late_ranks_by_fragment_have_the_bits_of_one_process(
    box, start, name, ranks, quorum, transport
):
    job = f"{name}-{ranks}-{transport}"
    options = {"name": job, "quorum": quorum, "grace_ms": 1, "transport": transport}
    results = start(trains, ranks, HOW[name], options).results()
    late = {
        (record["rank"], record.get("fragment", 0), number)
        for record in box.log(job)
        if record["kind"] == "late"
        for number in range(record["round"], record["last_round"] + 1)
    }
    print(f"late: {sorted(late)}")
    assert len({fragment for _, fragment, _ in late}) > 1, "nobody was late in some fragment"
    expected = LateOracle(late, [steps for steps, _ in results], **HOW[name]).run()
    assert_same_bits([parameters for _, parameters in results], expected)
