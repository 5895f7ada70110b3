"""Two boxes with one job: whichever dies, the other has the bits, and no round is lost."""

import os
import random
import signal
import time

import numpy as np
import pytest
from conftest import SEED, Box, wait_until

import phub

ELEMENTS = {"first": 70_000, "second": 9_000, "third": 3}
ROUNDS = 60
KILLS = int(os.environ.get("PHUB_KILLS", "3"))


class Pair:
    """A source, and the standby that has what it has."""

    def __init__(self, folder, *options, towards=()):
        self.standby = Box("--checkpoints", str(folder), "--standby-of", "source:7717", *options)
        self.source = Box("--standby", self.standby.address, *options, *towards)
        self.address = f"{self.source.address},{self.standby.address}"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.source.kill()
        self.standby.kill()


@pytest.fixture(params=["auto", "tcp"])
def pair(request, memory_path, monkeypatch):
    """Over memory between the boxes, and over TCP."""
    with Pair(memory_path / "standby", towards=("--parent-transport", request.param)) as two:
        monkeypatch.setenv("PHUB_SERVER", two.address)
        monkeypatch.setenv("PHUB_JOB", "job")
        yield two


def gradient(rank, number, key):
    salt = list(ELEMENTS).index(key)
    return np.random.default_rng([SEED, rank, number, salt]).standard_normal(
        ELEMENTS[key], dtype=np.float32
    )


def weight(rank, number):
    return 0.5 + rank + number % 4


def parameters(worker):
    return {key: np.array(worker.parameters(key)) for key in ELEMENTS}


def trains(rank, rounds, options, pause_s=0.0, until=None):
    """The parameters after each round, and how often this rank went on elsewhere."""
    worker = phub.Worker(ELEMENTS, initial="broadcast", lease_ms=1000, **options)
    initial = {key: gradient(99, 0, key) for key in ELEMENTS}
    worker.broadcast(initial)
    after, number, lives = {}, worker.first_round, 1
    while number <= rounds:
        try:
            if "weights" in options:
                worker.weight(weight(rank, number))
            for key in ELEMENTS:
                worker.push_copy(key, gradient(rank, number, key))
            worker.wait_all()
            after[number] = parameters(worker)
            number += 1
            time.sleep(pause_s)
        except phub.RewoundError:
            goes_on = worker.rejoin()
            worker.broadcast(initial)
            assert number <= goes_on <= number + 1, "a round is lost"
            after[goes_on - 1] = parameters(worker)
            number, lives = goes_on, lives + 1
        if until is not None and number == until:
            break
    if until is None:
        worker.barrier()
    worker.close()
    return after[number - 1], lives


OPTIONS = [
    {"optimizer": "momentum", "hyper": {"lr": 0.1, "momentum": 0.9}, "transport": "tcp"},
    {"optimizer": "adam", "hyper": {"lr": 0.01}, "transport": "tcp", "reduction": "mean"},
    {"optimizer": "adamw", "hyper": {"lr": 0.01}, "transport": "shm", "parameter_dtype": "bf16"},
    {"optimizer": "adagrad", "transport": "shm", "groups": "1,2"},
    {"optimizer": "adam", "state_dtype": "8bit", "transport": "tcp", "groups": "1,2"},
    {"optimizer": "adam", "weights": "yes", "reduction": "mean", "transport": "tcp"},
    {"optimizer": "momentum", "weights": "yes", "groups": "2,1", "transport": "shm"},
]


def reference(monkeypatch, start, world, options):
    with Box() as box:
        monkeypatch.setenv("PHUB_SERVER", box.address)
        return start(trains, world, ROUNDS, options).results()


def assert_same(results, expected):
    for mine, _ in results:
        for key in ELEMENTS:
            assert mine[key].tobytes() == expected[0][0][key].tobytes(), key


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: options["optimizer"])
def test_ranks_go_on_at_the_standby(pair, start, monkeypatch, options):
    world = 3
    ranks = start(trains, world, ROUNDS, options, 0.02)
    time.sleep(random.Random(SEED).uniform(0.3, 1.5))
    pair.source.kill()
    results = ranks.results()
    assert_same(results, reference(monkeypatch, start, world, options))
    assert {lives for _, lives in results} <= {1, 2}


def test_the_source_goes_on_alone(pair, start, monkeypatch):
    options = OPTIONS[1]
    ranks = start(trains, 3, ROUNDS, options, 0.02)
    time.sleep(random.Random(SEED).uniform(0.3, 1.5))
    pair.standby.kill()
    results = ranks.results()
    assert_same(results, reference(monkeypatch, start, 3, options))
    assert {lives for _, lives in results} == {1}


def test_a_lost_rank_does_not_count(pair, start):
    """The one that is left of three is the only member by the time that the source dies."""
    ranks = start(trains, 3, 4 * ROUNDS, OPTIONS[0], 0.02)
    time.sleep(0.8)
    ranks.kill(2)
    time.sleep(0.8)
    ranks.kill(1)
    time.sleep(0.8)
    pair.source.kill()
    assert ranks.result(0)[1] == 2


def pause_of(rank, rounds):
    """The longest time between two rounds, of ranks that see no round lost."""
    worker = phub.Worker(ELEMENTS, initial="broadcast", lease_ms=1000, **OPTIONS[1])
    initial = {key: gradient(99, 0, key) for key in ELEMENTS}
    worker.broadcast(initial)
    sent = {key: gradient(rank, 1, key) for key in ELEMENTS}
    number, longest, last = worker.first_round, 0.0, time.monotonic()
    while number <= rounds:
        try:
            for key in ELEMENTS:
                worker.push_copy(key, sent[key])
            worker.wait_all()
            number += 1
        except phub.RewoundError:
            goes_on = worker.rejoin()
            worker.broadcast(initial)
            assert number <= goes_on <= number + 1, "a round is lost"
            number = goes_on
        longest, last = max(longest, time.monotonic() - last), time.monotonic()
    worker.barrier()
    worker.close()
    return longest


def test_kills(memory_path, start, monkeypatch):
    """PHUB_KILLS: of so many sources."""
    monkeypatch.setenv("PHUB_JOB", "job")
    when = random.Random(SEED)
    pauses = []
    for kill in range(KILLS):
        with Pair(memory_path / f"standby-{kill}") as two:
            monkeypatch.setenv("PHUB_SERVER", two.address)
            ranks = start(pause_of, 2, 1500)
            wait_until(lambda: two.source.status("job").get("completed_round", 0) > 0, "a round")
            time.sleep(when.uniform(0, 0.3))
            two.source.kill()
            pauses.append(max(ranks.results()))
    pauses.sort()
    print(f"pauses: median {pauses[len(pauses) // 2]:.2f} s, longest {pauses[-1]:.2f} s")


def test_half_of_the_ranks_is_not_enough(pair, start):
    ranks = start(trains, 2, 10_000, OPTIONS[0], 0.02)
    time.sleep(0.8)
    ranks.kill(1)
    pair.source.kill()
    time.sleep(4)
    assert not ranks.pipes[0].poll(), "the rank goes on alone"
    assert pair.standby.status("job") == {}


def test_half_of_the_ranks_dies_with_the_standby(pair, start):
    """The rank that is left gets no result, and the job ends."""
    ranks = start(trains, 2, 10_000, OPTIONS[0], 0.02)
    time.sleep(0.8)
    ranks.kill(1, signal.SIGSTOP)  # so it cannot forgo the standby
    pair.standby.kill()
    wait_until(lambda: pair.source.status("job") == {}, "the job has ended")
    time.sleep(1.5)
    assert not ranks.pipes[0].poll(), "the rank goes on alone"
