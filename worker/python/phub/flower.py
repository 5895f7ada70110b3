"""Flower's FedAvg, whose arrays go through a box in place of Flower's messages.

It needs flwr, with the interfaces of 1.42, and NumPy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

try:
    from flwr.app import (  # type: ignore[import-not-found]
        Array,
        ArrayRecord,
        ConfigRecord,
        Message,
        MetricRecord,
        RecordDict,
    )
    from flwr.serverapp import strategy as _strategy  # type: ignore[import-not-found]
except ImportError as _error:
    raise ImportError(
        "phub.flower needs Flower, with the interfaces of version 1.42: pip install flwr"
    ) from _error

from phub._federated import Arrays, Giver, Plan, Taker, check_options, shapes_of
from phub._options import Option
from phub.errors import InvalidError

_PLAN, _RANK, _WEIGHT = "phub-plan", "phub-rank", "phub-weight"


class FedAvg(_strategy.FedAvg):  # type: ignore[misc]
    """FedAvg of flwr.serverapp.strategy. Its messages carry no arrays.

    In each round the clients that were chosen are ranks of a job, JOB-RUN-ROUND, as is this
    server: they get the arrays from the box, and give theirs, with their numbers of examples as
    weights. Their ClientApp calls `train` and `evaluate` of this module.
    """

    def __init__(
        self,
        *arguments: Any,
        box: str | None = None,
        job: str = "flower",
        options: Mapping[str, Option] | None = None,
        **named: Any,
    ) -> None:
        """The arguments of Flower's FedAvg, and these.

        box: its address, for this server and all clients; None: each has PHUB_SERVER.
        job: jobs' names begin with it.
        options: of `phub.Worker`, such as gradient_dtype, or join_limit_ms, for which clients wait
            for each other.
        Raises InvalidError for options with which results would not be means.
        """
        check_options(options or {})
        super().__init__(*arguments, **named)
        self._job, self._options = job, {**(options or {}), **({"box": box} if box else {})}
        self._giver: Giver | None = None

    def configure_train(self, server_round: int, arrays: Any, config: Any, grid: Any) -> Any:
        """Chooses clients, and gives the arrays to the box."""
        messages = super().configure_train(server_round, ArrayRecord(), config, grid)
        return self._planned(messages, f"{server_round}", arrays, averages=True)

    def aggregate_train(self, server_round: int, replies: Iterable[Any]) -> tuple[Any, Any]:
        """The mean that the box has; None if no client has given its arrays."""
        valid, _ = self._check_and_log_replies(replies, is_train=True, validate=False)
        giver, self._giver = self._giver, None
        if not valid or giver is None:
            return None, None
        found = giver.result()
        contents = [message.content for message in valid]
        metrics = self.train_metrics_aggr_fn(contents, self.weighted_by_key)
        return ArrayRecord({name: Array(array) for name, array in found.items()}), metrics

    def configure_evaluate(self, server_round: int, arrays: Any, config: Any, grid: Any) -> Any:
        """The same, for clients that give nothing back."""
        messages = super().configure_evaluate(server_round, ArrayRecord(), config, grid)
        return self._planned(messages, f"{server_round}-evaluate", arrays, averages=False)

    def _planned(self, given: Iterable[Any], name: str, record: Any, *, averages: bool) -> Any:
        messages = list(given)
        if not messages:
            return messages
        arrays: Arrays = {key: array.numpy() for key, array in record.items()}
        # All rounds of a server have other jobs than those of one that was started again.
        run = messages[0].metadata.run_id
        job = f"{self._job}-{run}-{name}"
        plan = Plan(job, 1 + len(messages), shapes_of(arrays), self._options, averages)
        self._giver = Giver(plan, arrays)
        return [self._message(message, plan, rank) for rank, message in enumerate(messages, 1)]

    def _message(self, message: Any, plan: Plan, rank: int) -> Any:
        ours = {_PLAN: plan.text(), _RANK: rank, _WEIGHT: self.weighted_by_key}
        config = ConfigRecord({**message.content[self.configrecord_key], **ours})
        return Message(
            content=RecordDict({self.configrecord_key: config}),
            message_type=message.metadata.message_type,
            dst_node_id=message.metadata.dst_node_id,
        )


Fit = Callable[[Arrays, Mapping[str, Any]], tuple[Arrays, int, Mapping[str, float]]]
Test = Callable[[Arrays, Mapping[str, Any]], tuple[int, Mapping[str, float]]]


def train(message: Any, fit: Fit) -> Any:
    """The reply to the message, for a ClientApp to return.

    fit: is called with the round's arrays (NumPy, by name) and Flower's config. It trains, and
    returns the new arrays, its number of examples, and metrics for the server.
    Raises Error, with which this client does not count in the round.
    """
    config = _config_of(message)
    with Taker(Plan.of_text(config[_PLAN]), config[_RANK]) as taker:
        arrays, examples, metrics = fit(taker.arrays, config)
        taker.give(arrays, examples)
    return _reply(message, config, examples, metrics)


def evaluate(message: Any, test: Test) -> Any:
    """The same for its evaluation. test: returns its number of examples, and metrics."""
    config = _config_of(message)
    with Taker(Plan.of_text(config[_PLAN]), config[_RANK]) as taker:
        arrays = taker.arrays
    examples, metrics = test(arrays, config)
    return _reply(message, config, examples, metrics)


def _config_of(message: Any) -> Any:
    for config in message.content.config_records.values():
        if _PLAN in config:
            return config
    raise InvalidError(
        "the message is not of phub.flower.FedAvg: let the ServerApp use it in place of Flower's"
    )


def _reply(message: Any, config: Any, examples: int, metrics: Mapping[str, float]) -> Any:
    record = MetricRecord({**metrics, config[_WEIGHT]: examples})
    return Message(content=RecordDict({"metrics": record}), reply_to=message)


__all__ = ["FedAvg", "evaluate", "train"]
