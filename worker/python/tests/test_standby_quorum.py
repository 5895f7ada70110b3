"""A source whose rounds go on without late ranks is killed: nothing counts twice, no round is lost.

What a rank sends has a place of its own in the parameters, where each time that it counts is seen.
"""

import os
import random
import time
from collections import defaultdict
from itertools import pairwise

import numpy as np
import pytest
import torch
from conftest import SEED, refused, wait_until
from test_standby import Pair

import phub

PLACES, RANKS, BLOCKS, CHUNK = 2000, 3, 3, 8192  # a rank's contributions; chunks of a key
PAUSES = 0.004, 0.004, 0.02  # before each push; the last rank is five times as slow
KILLS = int(os.environ.get("PHUB_KILLS", "20"))


class Sender:
    """A rank's contributions to one key: each has a number."""

    def __init__(self, worker, rank, key):
        self.worker, self.rank, self.key = worker, rank, key
        # Numbers: of the next new one, not one of a predecessor's; of those to be sent again.
        self.first = self.next = 0 if worker.first_round == 1 else PLACES // 2
        self.again = []
        self.counted = {}  # the rounds in which they counted, by number
        self.under_way = None  # a number, and the round that it was sent for

    def at(self, number):
        return self.rank * PLACES + number

    def send(self):
        if not self.again:
            self.again, self.next = [self.next], self.next + 1
        self.under_way = self.again.pop(0), self.worker.round(self.key) + 1
        gradient = np.zeros((BLOCKS, CHUNK), np.float32)
        gradient[:, self.at(self.under_way[0])] = 1
        self.worker.push_copy(self.key, gradient)

    def take(self):
        self.worker.wait(self.key)
        self.counted[self.under_way[0]] = self.worker.round(self.key)
        self.under_way = None
        self.check()

    def goes_on(self, first_round):
        """The source is gone, and the next round is this one: what is of it is to be sent again."""
        self.again = [number for number, of in self.counted.items() if of >= first_round]
        for number in self.again:
            del self.counted[number]
        if self.under_way and self.under_way[1] >= first_round:
            self.again.append(self.under_way[0])
        self.under_way = None  # if it was for an earlier one, it counted, or never will
        self.check()

    def check(self):
        times = -self.parameters()[:, self.at(0) : self.at(PLACES)]
        assert times.max() <= 1, "a contribution counts twice"
        # A predecessor that died while it sent may count in some chunks alone.
        mine = times[:, self.first :]
        assert (mine == mine[0]).all(), "chunks are of different rounds"
        assert all(times[0, number] == 1 for number in self.counted), "what counted is lost"
        assert not any(times[0, number] for number in self.again), "what is sent again counts"

    def parameters(self):
        return np.array(self.worker.parameters(self.key)).reshape(BLOCKS, CHUNK)


def trains(rank, rounds, fragments, pauses):
    """The parameters of each key, of its latest round; and how often it went on elsewhere."""
    keys = {f"key{f}": phub.Key(BLOCKS * CHUNK, fragment=f) for f in range(fragments)}
    worker = phub.Worker(
        keys,
        optimizer="sgd",
        hyper={"lr": 1.0},
        initial="broadcast",
        quorum=2,
        grace_ms=1,
        lease_ms=1000,
    )
    initial = {key: np.zeros(BLOCKS * CHUNK, np.float32) for key in keys}
    worker.broadcast(initial)
    senders, lives = [Sender(worker, rank, key) for key in keys], 1
    chance = random.Random(f"{SEED}-{rank}")
    while min(worker.round(key) for key in keys) < rounds:
        try:
            for sender in senders:
                time.sleep(pauses[rank] * chance.uniform(0.5, 1.5))
                sender.send()
                sender.take()
        except phub.RewoundError:
            rounds_here = [worker.round(key) for key in keys]
            first_round = worker.rejoin()
            assert min(rounds_here) < first_round, "a round is lost"
            assert max(rounds_here) <= first_round, "a fragment was ahead by more than a round"
            worker.broadcast(initial)
            for sender in senders:
                sender.goes_on(first_round)
            lives += 1
    found = {
        sender.key: (worker.round(sender.key), sender.parameters(), sender.counted)
        for sender in senders
    }
    worker.close()
    return found, lives


def check_same(results):
    """Of a round all have the same bits, which have what counted until then."""
    by_round, missed = defaultdict(set), 0
    for found, _ in results:
        for key, (number, parameters, counted) in found.items():
            by_round[key, number].add(parameters.tobytes())
            missed += sum(later - sooner > 1 for sooner, later in pairwise(counted.values()))
    assert all(len(bits) == 1 for bits in by_round.values())
    for key in results[0][0]:
        last = max(results, key=lambda result: result[0][key][0])[0][key]
        for rank, (found, _) in enumerate(results):
            for number, counted_in in found[key][2].items():
                if counted_in <= last[0]:
                    assert (last[1][:, rank * PLACES + number] == -1).all()
    assert missed > 0, "nobody was ever late"


FRAGMENTS = [1, 3]


@pytest.mark.parametrize("fragments", FRAGMENTS)
def test_nothing_counts_twice(memory_path, start, monkeypatch, fragments):
    """PHUB_KILLS: of so many sources."""
    monkeypatch.setenv("PHUB_JOB", "job")
    when = random.Random(SEED)
    for kill in range(KILLS // len(FRAGMENTS)):
        with Pair(memory_path / f"standby-{kill}") as two:
            monkeypatch.setenv("PHUB_SERVER", two.address)
            ranks = start(trains, RANKS, 100, fragments, PAUSES)
            wait_until(lambda: two.source.status("job").get("completed_round", 0) > 5, "rounds")
            time.sleep(when.uniform(0, 0.3))
            two.source.kill()
            results = ranks.results()
            check_same(results)
            assert {lives for _, lives in results} == {2}


@pytest.mark.parametrize("fragments", FRAGMENTS)
def test_the_source_goes_on_alone(memory_path, start, monkeypatch, fragments):
    monkeypatch.setenv("PHUB_JOB", "job")
    with Pair(memory_path / "standby") as two:
        monkeypatch.setenv("PHUB_SERVER", two.address)
        ranks = start(trains, RANKS, 100, fragments, PAUSES)
        wait_until(lambda: two.source.status("job").get("completed_round", 0) > 5, "rounds")
        two.standby.kill()
        results = ranks.results()
        check_same(results)
        assert {lives for _, lives in results} == {1}


def streams(rank):
    """The base, and the round of each fragment; and how often it went on elsewhere."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(40, 300), torch.nn.Tanh(), torch.nn.Linear(300, 8))
    inner = torch.optim.AdamW(model.parameters(), 1e-3)
    how = {"fragments": 3, "delay": 2, "quorum": 2, "grace_ms": 1, "lease_ms": 1000}
    outer, lives = phub.DiLoCo(model, inner, sync_every=6, **how), 1
    generator = torch.Generator().manual_seed(rank)
    keys = list(outer.base())
    while min(outer.worker.round(key.name) for key in outer._keys) < 150:
        time.sleep(PAUSES[rank] / 4)
        try:
            inputs = torch.randn(16, 40, generator=generator)
            model(inputs).square().mean().backward()
            inner.step()
            inner.zero_grad()
        except phub.RewoundError:
            outer.rejoin()
            lives += 1
    base = outer.base()
    rounds = {key: outer.worker.round(key) for key in keys}
    outer.close()
    return {key: (rounds[key], base[key].numpy().tobytes()) for key in keys}, lives


def test_a_streaming_diloco_goes_on(memory_path, start, monkeypatch):
    monkeypatch.setenv("PHUB_JOB", "job")
    with Pair(memory_path / "standby") as two:
        monkeypatch.setenv("PHUB_SERVER", two.address)
        ranks = start(streams, RANKS)
        wait_until(lambda: two.source.status("job").get("completed_round", 0) > 5, "rounds")
        time.sleep(random.Random(SEED).uniform(0, 0.5))
        two.source.kill()
        results = ranks.results()
        assert {lives for _, lives in results} == {2}
        for key in results[0][0]:
            bases = {base[key] for base, _ in results}
            assert len(bases) == len({number for number, _ in bases}), "of a round there are two"


def has_state(rank):
    how = {"optimizer": "sgd", "hyper": {"lr": 1.0}, "gradient_dtype": "int8", "quorum": 1}
    refused("without a standby", phub.Worker, {"key": 5}, **how)


def test_state_of_a_late_rank_cannot_go_to_a_standby(memory_path, start, monkeypatch):
    monkeypatch.setenv("PHUB_JOB", "job")
    with Pair(memory_path / "standby") as two:
        monkeypatch.setenv("PHUB_SERVER", two.address)
        start(has_state, 1).results()


@pytest.mark.parametrize("lost", [1, 2])
def test_a_rank_dies_with_the_source(memory_path, start, monkeypatch, lost):
    monkeypatch.setenv("PHUB_JOB", "job")
    with Pair(memory_path / "standby") as two:
        monkeypatch.setenv("PHUB_SERVER", two.address)
        ranks = start(trains, RANKS, 100, 2, PAUSES)
        wait_until(lambda: two.source.status("job").get("completed_round", 0) > 5, "rounds")
        ranks.kill(lost)
        two.source.kill()
        ranks.replace(lost)
        results = ranks.results()
        check_same(results)
        assert [lives for _, lives in results] == [
            1 if rank == lost else 2 for rank in range(RANKS)
        ]
