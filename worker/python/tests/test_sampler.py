"""What ranks take of the data: each sample once an epoch; restarts in the middle of one."""

import io
import itertools
import json
import random

import pytest
import torch
from conftest import PACKAGE, SEED, refused
from deaths import JOB, STEPS, NoDeath, death_anywhere, live
from exact import assert_same_bits
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

import phub

ORDERS = PACKAGE.parents[1] / "tests/worker/data_orders.txt"


class Numbers(Dataset):
    """Each sample is its own number."""

    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return self.samples

    def __getitem__(self, number):
        return number


def drawn(draw):
    """A number of samples, and options of a sampler but for its rank."""
    world_size = draw.randint(1, 6)
    flags = {"shuffle": draw.random() < 0.8, "drop_last": draw.random() < 0.5}
    seed = draw.getrandbits(64)
    return draw.randint(world_size, 90), {"world_size": world_size, "seed": seed, **flags}


def of(samples, rank=0, **options):
    return phub.Sampler(range(samples), rank=rank, **options)


def loader_of(sampler, samples, size, **options):
    return DataLoader(Numbers(samples), batch_size=size, sampler=sampler, **options)


def state_after(sampler, batches, size):
    sampler.skip(batches, size)
    return sampler.state_dict()


def lists(batches):
    return [batch.tolist() for batch in batches]


# ---- The order.


def test_the_orders_are_those_of_cpp():
    """data_shards_test.cc holds C++ to the same file."""
    lines = [line.split() for line in ORDERS.read_text().splitlines() if line[0] != "#"]
    assert len(lines) >= 10
    for partition, *numbers in lines:
        samples, rank, world, seed, shuffle, last, epoch, position, *rows = map(int, numbers)
        options = {"seed": seed, "shuffle": bool(shuffle), "drop_last": bool(last)}
        sampler = of(samples, rank, world_size=world, private=partition == "private", **options)
        begin = {"epoch": epoch, "position": position}
        sampler.load_state_dict({**sampler.state_dict(), **begin})
        assert list(itertools.islice(sampler, 20)) == rows
        assert len(rows) == min(20, sampler.left)


def test_an_epoch_has_each_sample_once_and_without_shuffling_pytorchs_order():
    draw = random.Random(SEED)
    for _ in range(100):
        samples, options = drawn(draw)
        world, drop_last = options["world_size"], options["drop_last"]
        for epoch in range(3):
            taken = []
            for rank in range(world):
                sampler = of(samples, rank, **options)
                sampler.set_epoch(epoch)
                taken.extend(sampler)
            assert len(taken) == (samples // world if drop_last else -(-samples // world)) * world
            assert set(taken) <= set(range(samples))
            assert len(set(taken)) == (len(taken) if drop_last else samples)
        for rank in range(world):
            rows = range(samples)
            theirs = DistributedSampler(rows, world, rank, shuffle=False, drop_last=drop_last)
            mine = of(samples, rank, **{**options, "shuffle": False})
            assert list(mine) == list(theirs)
            assert len(mine) == len(theirs)


def test_private_data_is_each_ranks_own():
    ranks = [of(50, rank, world_size=2, private=True) for rank in range(2)]
    assert [sorted(rank) for rank in ranks] == [list(range(50))] * 2
    assert list(ranks[0]) != list(ranks[1])
    ranks[0].skip(0, 1)
    message = "its rank is 0, and that of this data is 1"
    refused(message, ranks[1].load_state_dict, ranks[0].state_dict())
    other = of(50, world_size=9, private=True)
    other.load_state_dict(state_after(ranks[0], 3, 7))
    assert list(other) == list(ranks[0])


# ---- Batches of a DataLoader.


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"drop_last": True},
        {"num_workers": 2},
        {"num_workers": 2, "persistent_workers": True, "prefetch_factor": 4},
    ],
    ids=["here", "drop_last", "workers", "persistent"],
)
def test_a_restart_goes_on_with_the_batches_that_were_not_taken(how):
    draw = random.Random(f"{SEED} {how}")
    samples, options = drawn(draw)
    samples += 60  # several batches in an epoch
    rank = draw.randrange(options["world_size"])

    def make():
        sampler = of(samples, rank, **options)
        return sampler, loader_of(sampler, samples, 1 + len(sampler) // 5, **how)

    sampler, loader = make()
    states, taken = [], []
    for batch in sampler.batches(loader, until=3):
        taken.append(batch.tolist())
        states.append(sampler.state_dict())
    assert sampler.epoch == 3
    for number in range(len(states)) if not how else draw.sample(range(len(states)), 2):
        sampler, loader = make()
        sampler.load_state_dict(json.loads(json.dumps(states[number])))
        assert lists(sampler.batches(loader, until=3)) == taken[number + 1 :]
    # The same iterator, after its sampler was set back.
    sampler, loader = make()
    batches = sampler.batches(loader, until=3)
    assert lists(itertools.islice(batches, 4)) == taken[:4]
    sampler.load_state_dict(states[1])
    assert lists(itertools.islice(batches, 2)) == taken[2:4]
    sampler.set_epoch(sampler.epoch)
    assert next(batches).tolist() == taken[4]
    sampler.set_epoch(3)
    sampler.set_epoch(0)
    assert lists(batches) == taken


def test_an_epoch_of_batches_is_one_of_the_sampler():
    class Counted(phub.Sampler):
        begun = 0

        def __iter__(self):
            self.begun += 1
            return super().__iter__()

    counted = Counted(range(103), rank=1, world_size=2)
    assert len(lists(counted.batches(loader_of(counted, 103, 8), until=3))) == 3 * 7
    assert counted.begun == 3

    sampler = of(103, 1, world_size=2, seed=SEED)
    loader = loader_of(sampler, 103, 8, num_workers=1)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        expected = list(sampler)
        batches = lists(sampler.batches(loader, until=epoch + 1))
        assert [len(batch) for batch in batches] == [8] * 6 + [4]
        assert list(itertools.chain(*batches)) == expected
    first = next(iter(sampler))
    assert next(sampler.batches(loader_of(sampler, 103, None))) == first
    assert sampler.left == 51


def test_samples_that_nobody_counts_are_no_state():
    sampler = of(40, world_size=2)
    loader = loader_of(sampler, 40, 4)
    batch = next(iter(loader))
    message = r"iterate over sampler.batches\(loader\)"
    refused(message, sampler.state_dict, error=RuntimeError)
    assert torch.equal(batch, next(sampler.batches(loader)))
    assert sampler.state_dict()["position"] == 8
    list(loader)
    sampler.skip(1, 4)
    assert sampler.state_dict()["position"] == 16


def test_loaders_that_cannot_be_counted_are_refused():
    sampler = of(40, world_size=2)
    for message, loader in (
        ("has another sampler", loader_of(of(40, world_size=2), 40, 1)),
        ("in_order=False", loader_of(sampler, 40, 1, num_workers=2, in_order=False)),
    ):
        refused(message, sampler.batches, loader)
    loader = loader_of(sampler, 40, 21, drop_last=True)
    message = "20 samples for this rank, and the DataLoader"
    refused(message, lambda: next(sampler.batches(loader)))
    sampler.skip(1, 5)  # what is left is no batch, and the next epoch has one
    assert len(next(sampler.batches(loader_of(sampler, 40, 20, drop_last=True)))) == 20
    assert sampler.epoch == 2


# ---- The state.


def test_samples_that_are_taken_or_skipped_are_those_of_the_loader():
    draw = random.Random(SEED)
    for _ in range(50):
        samples, options = drawn(draw)
        one, taking, skipping = (of(samples, **options) for _ in range(3))
        for _ in range(5):
            size, batches = draw.randint(1, 20), draw.randint(0, 10)
            for batch in itertools.islice(one.batches(loader_of(one, samples, size)), batches):
                assert taking.next(size) == batch.tolist()
                assert taking.state_dict() == one.state_dict()
            assert state_after(skipping, batches, size) == one.state_dict()
    refused("at least 1", taking.next, 0)


def test_another_world_goes_on_in_the_middle_of_an_epoch():
    draw = random.Random(SEED)
    for _ in range(100):
        samples, options = drawn(draw)
        samples += 6  # not fewer than ranks
        taken, state = {0: [], 1: [], 2: []}, None
        while state is None or state["epoch"] < 2:
            options["world_size"] = draw.randint(1, 6)
            size, batches = draw.randint(1, 5), draw.randint(1, 3)
            states = []
            for rank in range(options["world_size"]):
                sampler = of(samples, rank, **options)
                if state:
                    sampler.load_state_dict(state)
                    assert sampler.left > 0
                loaded = sampler.batches(loader_of(sampler, samples, size), until=2)
                for _ in range(batches):
                    epoch = sampler.epoch
                    taken[epoch].extend(itertools.chain(*lists(itertools.islice(loaded, 1))))
                states.append(sampler.state_dict())
            assert all(each == states[0] for each in states)
            state = draw.choice(states)
        for epoch in range(2):
            if options["drop_last"]:
                assert len(set(taken[epoch])) == len(taken[epoch]) > samples - 6
            else:
                assert set(taken[epoch]) == set(range(samples))
                assert len(taken[epoch]) < samples + 6


def test_states_of_other_data_are_refused():
    options = {"world_size": 2, "seed": 5}
    sampler = of(100, **options)
    before = state_after(sampler, 3, 8)
    for words, data, change in [
        ("samples is 101, and that of this data is 100", 101, {}),
        ("seed is 6", 100, {"seed": 6}),
        ("shuffle is False", 100, {"shuffle": False}),
        ("drop_last is True", 100, {"drop_last": True}),
        ("partition is private", 100, {"private": True}),
    ]:
        other = of(data, **{**options, **change})
        refused(words, sampler.load_state_dict, other.state_dict())
    for words, state in [
        ("no position 100 in epoch 0", {**before, "position": 100}),
        ("no position -1", {**before, "position": -1}),
        ("epoch -2", {**before, "epoch": -2}),
        ("no numbers", {**before, "epoch": "0"}),
        ("not what a phub.Sampler saved", {**before, "more": 0}),
        ("not what a phub.Sampler saved", {}),
    ]:
        refused(words, sampler.load_state_dict, state)
    assert sampler.state_dict() == before
    content = io.BytesIO()
    torch.save(before, content)
    content.seek(0)
    assert torch.load(content, weights_only=True) == before


def test_bad_arguments_are_refused():
    sampler = of(9, world_size=1)
    for words, call, *arguments, options in [
        ("0 samples", of, 0, {"world_size": 1}),
        ("rank 2 of the data is outside", of, 9, 2, {"world_size": 2}),
        ("seed of the data is -1", of, 9, {"world_size": 1, "seed": -1}),
        ("too few for 10 ranks", of, 9, {"world_size": 10, "drop_last": True}),
        ("cannot be skipped", sampler.skip, -1, 4, {}),
        ("no epoch -1", sampler.set_epoch, -1, {}),
    ]:
        refused(words, call, *arguments, **options)


# ---- Trainings whose box is killed.

SAMPLES, BATCH = 210, 4


def trains(rank, world_size, workers, job, death):
    """Returns what it took in each step, in how many lives, and the parameters."""
    torch.manual_seed(SEED)
    inputs, labels = torch.randn(SAMPLES, 12), torch.randint(5, (SAMPLES,))
    net = nn.Linear(12, 5)
    optimizer = phub.DistributedOptimizer(torch.optim.SGD(net.parameters(), 0.1), net, job=job)
    sampler = phub.Sampler(inputs, rank=rank, world_size=world_size, seed=SEED)
    data = TensorDataset(inputs, labels, torch.arange(SAMPLES))
    # A worker whose rank is killed while it starts would stay.
    how = {"num_workers": workers, "persistent_workers": workers > 0}
    loader = DataLoader(data, batch_size=BATCH, sampler=sampler, **how)
    batches = sampler.batches(loader)
    taken = {}

    def make_step(step):
        death.at(rank, step, 0)
        rows, answers, numbers = next(batches)
        assert taken.setdefault(step, numbers.tolist()) == numbers.tolist()
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(rows), answers).backward()
        death.at(rank, step, 1)
        optimizer.step()
        death.at(rank, step, 2)

    lives = live(optimizer, make_step, sampler=sampler)
    return taken, lives, net.weight.detach().clone()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_training_goes_on_in_the_middle_of_an_epoch(saving_box, start, workers):
    calm = start(trains, 2, 2, workers, "calm", NoDeath()).results()
    epoch = [sample for each in calm for step in range(27) for sample in each[0][step]]
    assert sorted(epoch) == list(range(SAMPLES))
    death = death_anywhere(f"{workers} loaders")
    found = death.happens(saving_box, start(trains, 2, 2, workers, JOB, death))
    assert_same_bits(found, [(taken, 2, weight) for taken, _, weight in calm])


@pytest.mark.parametrize("world_size", [3, 2])
def test_programs_that_are_started_again_go_on(saving_box, start, world_size):
    """After all have died, box and ranks; 3 ranks before, perhaps fewer then."""
    calm = start(trains, 3, 3, 2, "calm", NoDeath()).results()
    death = death_anywhere(f"of all, {world_size}")
    death.happens_to_all(saving_box, start(trains, 3, 3, 2, JOB, death))
    results = start(trains, world_size, world_size, 2, JOB, NoDeath()).results()
    first = min(results[0][0])
    assert first > 0
    before = [sample for step in range(first) for each in calm for sample in each[0][step]]
    if world_size == 3:
        for (taken, _, weight), (expected, *_, same) in zip(results, calm, strict=True):
            assert taken == {step: expected[step] for step in range(first, STEPS)}
            assert torch.equal(weight, same)
    # Whatever the world, each epoch has each sample once, but for what fills up its end.
    steps = [[each[0][step] for each in results] for step in range(first, STEPS)]
    after = [sample for step in steps for batch in step for sample in batch]
    rest = SAMPLES - len(before) % SAMPLES
    epoch = before[len(before) // SAMPLES * SAMPLES :] + after[:rest]
    assert len(set(epoch)) == len(epoch)
    assert len(after) < rest or len(epoch) == SAMPLES
