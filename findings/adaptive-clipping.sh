#!/usr/bin/env bash
# Flower's differential privacy with adaptive clipping: the clipping norm is to go where the wanted
# part of the clients has larger updates, as in its paper (arXiv 1905.03871). Twenty clients have
# updates with norms from 0.5 to 1.45. Without noise, so that one sees the rule.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
install flwr==1.42.0 numpy==2.4.6

seen=$("$python" -W ignore - 2>"$errors" <<'PYTHON'
import logging
from importlib.metadata import version

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import DifferentialPrivacyServerSideAdaptiveClipping, FedAvg
from flwr.supercore.task_identity import TaskIdentity

CLIENTS = 20
logging.disable()
# What the runtime sets before it calls a program.
TaskIdentity.run_id = TaskIdentity.task_id = TaskIdentity.node_id = 1


class Clients:
    def get_node_ids(self):
        return range(1, CLIENTS + 1)


def norms(start, rounds):
    """The clipping norm after each round."""
    strategy = DifferentialPrivacyServerSideAdaptiveClipping(
        FedAvg(), noise_multiplier=0, num_sampled_clients=CLIENTS, initial_clipping_norm=start,
        target_clipped_quantile=0.5)
    weights = ArrayRecord([np.zeros(1)])
    for number in range(1, rounds + 1):
        before = weights.to_numpy_ndarrays()[0]
        replies = []
        asked = strategy.configure_train(number, weights, ConfigRecord(), Clients())
        for client, message in enumerate(asked):
            trained = ArrayRecord([before + 0.5 + client / CLIENTS])
            content = {"arrays": trained, "metrics": MetricRecord({"num-examples": 1})}
            replies.append(Message(RecordDict(content), reply_to=message))
        weights = strategy.aggregate_train(number, replies)[0]
        yield strategy.clipping_norm


print("flwr", version("flwr"))
for start in (0.1, 0.9, 1.1):
    found = list(norms(start, 100))
    print(f"from {start}:", ", ".join(f"{found[n - 1]:.2g}" for n in (1, 10, 50, 100)))
PYTHON
)
verdict 'after 100 rounds half of the clients are clipped: a norm of about 1' "$seen" \
  "flwr 1.42.0
from 0.1: 0.09, 0.037, 0.00067, 4.5e-06
from 0.9: 0.89, 0.65, 0.013, 8.9e-05
from 1.1: 1.1, 2.2, 1.2e+02, 1.8e+04"
