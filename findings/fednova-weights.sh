#!/usr/bin/env bash
# Federated averaging with fluke: two clients, with 100 and 900 samples, that leave the model as it
# is, and then two that each add 1 to its weight. What a client sends to FedNova's server (arXiv
# 2007.07481) is the number of its steps, if there is no momentum.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
install fluke-fl==0.8.1 torch==2.14.1 torchvision==0.29.1 numpy==2.4.6

seen=$("$python" -W ignore - 2>"$errors" <<'PYTHON'
from importlib.metadata import version
from types import SimpleNamespace

import torch
from fluke.algorithms.fedavgm import FedAVGMServer
from fluke.algorithms.fednova import FedNovaServer
from fluke.comm import Message
from fluke.server import Server

CLIENTS = [SimpleNamespace(index=0, n_examples=100), SimpleNamespace(index=1, n_examples=900)]
STEPS = [10, 90]
ROUNDS = 3


def model(weight):
    layer = torch.nn.Linear(1, 1, bias=False)
    layer.weight.data.fill_(weight)
    return layer


def weights(kind, change):
    """The weight of the server's model after each round, from 1 on."""
    server = kind(model=model(1.0), test_set=None, clients=CLIENTS, weighted=True)
    for _ in range(ROUNDS):
        for client, steps in zip(CLIENTS, STEPS):
            server.channel.send(Message(steps, "local_a", client.index, inmemory=True), "server")
        trained = [model(server.model.weight.item() + change) for _ in CLIENTS]
        server.aggregate(CLIENTS, trained)
        yield f"{server.model.weight.item():.2f}"


print("fluke-fl", version("fluke-fl"))
for change in (0, 1):
    for kind in (Server, FedAVGMServer, FedNovaServer):
        print(f"{kind.__name__}, clients add {change}:", *weights(kind, change))
PYTHON
)
verdict 'a weight of 1 stays if nobody changes it, and is 2 after the first round that adds 1' \
  "$seen" \
  "fluke-fl 0.8.1
Server, clients add 0: 1.00 1.00 1.00
FedAVGMServer, clients add 0: 1.00 1.00 1.00
FedNovaServer, clients add 0: 1.64 2.69 4.41
Server, clients add 1: 2.00 3.00 4.00
FedAVGMServer, clients add 1: 1.00 2.00 3.90
FedNovaServer, clients add 1: 3.28 7.02 13.15"
