"""Federated averaging through a box: of ranks of this package, and of Flower where it is installed.

`pip install flwr==1.42.0` into an environment with torch, or PYTHONPATH of one that has it, for the
latter.
"""

import threading

import numpy as np
import pytest
from conftest import SEED, refused
from exact import job

from phub._federated import Giver, Plan, Taker, check_options, shapes_of

ROUNDS = 3
EXAMPLES = (40, 7, 331)
SHAPES = {"weight": (300, 70), "bias": (70,), "scale": ()}


def arrays_of(seed):
    draw = np.random.default_rng([SEED, seed])
    return {name: draw.standard_normal(shape, np.float32) for name, shape in SHAPES.items()}


def trained(arrays, client, rounds):
    """What a client makes of the arrays of the round."""
    more = arrays_of(1000 * client + rounds)
    return {name: np.asarray(array / 2 + more[name]) for name, array in arrays.items()}


def in_rank_order(results, examples):
    """As the box adds: products and sums of float32, times float(1 / n)."""
    mean = {}
    for name, shape in SHAPES.items():
        total = np.zeros(shape, np.float32)
        for result, count in zip(results, examples, strict=True):
            total = total + np.float32(count) * result[name]
        mean[name] = total * np.float32(1 / sum(examples))
    return mean


def assert_same_arrays(one, other):
    assert one.keys() == other.keys()
    for name, array in one.items():
        assert array.dtype == np.float32, name
        assert array.shape == SHAPES[name], name
        np.testing.assert_array_equal(array, other[name], name)


def serves_or_trains(rank, name):
    mean, options = arrays_of(0), {"transport": "tcp"}
    for number in range(ROUNDS):
        plan = Plan(f"{name}-{number}", 1 + len(EXAMPLES), SHAPES, options)
        plan = Plan.of_text(plan.text())
        if rank == 0:
            mean = Giver(plan, mean).result()
            continue
        with Taker(plan, rank) as taker:
            if number:
                assert_same_arrays(taker.arrays, mean)
            mean = taker.give(trained(taker.arrays, rank, number), EXAMPLES[rank - 1])
    return mean


def expected(rounds, clients=(1, 2, 3)):
    mean = arrays_of(0)
    for number in range(rounds):
        results = [trained(mean, client, number) for client in clients]
        mean = in_rank_order(results, [EXAMPLES[client - 1] for client in clients])
    return mean


def test_the_mean_is_that_of_all_examples(box, start):
    found = start(serves_or_trains, 1 + len(EXAMPLES), job("mean")).results()
    for each in found:
        assert_same_arrays(each, expected(ROUNDS))


def gives_or_fails(rank, name):
    plan = Plan(name, 3, SHAPES, {"join_limit_ms": 20_000})
    if rank == 0:
        return Giver(plan, arrays_of(0)).result()
    if rank == 2:
        with Taker(plan, rank):
            raise ZeroDivisionError
    with Taker(plan, rank) as taker:
        refused("examples", taker.give, taker.arrays, 0)
        refused("'bias'", taker.give, {k: v for k, v in taker.arrays.items() if k != "bias"}, 1)
        return taker.give(trained(taker.arrays, 1, 0), EXAMPLES[0])


def test_a_client_that_fails_does_not_count(box, start):
    ranks = start(gives_or_fails, 3, job("fails"))
    with pytest.raises(ZeroDivisionError):
        ranks.result(2)
    for rank in (0, 1):
        assert_same_arrays(ranks.result(rank), expected(1, [1]))


def test_other_arrays_are_refused():
    refused("'count' has 1 elements of int64", shapes_of, {"count": np.array(3)})
    refused("'none' has 0 elements", shapes_of, {"none": np.zeros(0, np.float32)})
    check_options({"gradient_dtype": "bf16", "transport": "tcp"})
    refused("parameter_dtype='bf16'", check_options, {"parameter_dtype": "bf16"})
    refused("with rank", check_options, {"rank": 1})
    refused("a step of the box", check_options, {"optimizer": "adam"})


# ---- Of Flower.


class Threads:
    """A grid whose clients are threads of this process."""

    def __init__(self, apps):
        self.apps = apps

    def get_node_ids(self):
        return range(1, 1 + len(EXAMPLES))

    def send_and_receive(self, messages, timeout=None):
        from flwr.app import Error, Message

        replies = {}

        def client(message):
            node = message.metadata.dst_node_id
            assert not message.content.array_records
            try:
                replies[node] = self.apps[message.metadata.message_type](message, node)
            except Exception as error:
                replies[node] = Message(Error(0, repr(error)), reply_to=message)

        threads = [threading.Thread(target=client, args=[message]) for message in messages]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [replies[node] for node in sorted(replies)]


def flower_trains(_, name):
    from flwr.app import Array, ArrayRecord
    from flwr.serverapp.strategy import FedAvg
    from flwr.supercore.task_identity import TaskIdentity

    import phub.flower

    TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1
    number_of = {}  # the place of a node among the ranks, by round
    failed = []

    def train(message, node):
        def fit(arrays, config):
            number = config["server-round"] - 1
            number_of[number, node] = config["phub-rank"]
            if (number, node) == (ROUNDS, 2):
                failed.append(node)
                raise ZeroDivisionError
            return trained(arrays, node, number), EXAMPLES[node - 1], {"loss": float(node)}

        return phub.flower.train(message, fit)

    def evaluate(message, node):
        def test(arrays, _):
            return EXAMPLES[node - 1], {"norm": float(np.abs(arrays["weight"]).mean())}

        return phub.flower.evaluate(message, test)

    seen = []
    strategy = phub.flower.FedAvg(job=name, min_available_nodes=3)
    strategy.start(
        Threads({"train": train, "evaluate": evaluate}),
        ArrayRecord({key: Array(array) for key, array in arrays_of(0).items()}),
        num_rounds=ROUNDS + 1,
        evaluate_fn=lambda _, record: seen.append({k: v.numpy() for k, v in record.items()}),
    )
    assert len(seen) == ROUNDS + 2
    assert failed == [2]
    for number in range(ROUNDS + 1):
        nodes = [node for node in (1, 2, 3) if (number, node) != (ROUNDS, 2)]
        nodes.sort(key=lambda node: number_of[number, node])
        results = [trained(seen[number], node, number) for node in nodes]
        counts = [EXAMPLES[node - 1] for node in nodes]
        assert_same_arrays(seen[number + 1], in_rank_order(results, counts))
        plain = plain_mean(FedAvg(), results, counts)
        for key, array in seen[number + 1].items():
            np.testing.assert_allclose(array, plain[key], rtol=1e-5, atol=1e-6)


def plain_mean(strategy, results, counts):
    """Flower's own."""
    from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict

    replies = []
    for result, count in zip(results, counts, strict=True):
        arrays = ArrayRecord({key: Array(array) for key, array in result.items()})
        content = RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": count})})
        replies.append(Message(content=content, message_type="train", dst_node_id=1))
    record, _ = strategy.aggregate_train(1, replies)
    return {key: array.numpy() for key, array in record.items()}


def test_flowers_arrays_go_through_the_box(box, start):
    pytest.importorskip("flwr", reason="flwr is not installed: pip install flwr==1.42.0")
    start(flower_trains, 1, job("flower"), FLWR_TELEMETRY_ENABLED="0").results()
