#!/usr/bin/env bash
# LightGBM on two machines (here two processes) that have 100 rows around 0 and 900 around 10, with
# a feature that says nothing: what it predicts is a median, or a quantile, of the labels.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
install lightgbm==4.7.0 numpy==2.4.6 scipy==1.17.1

cat >"$folder/train.py" <<'PYTHON'
import multiprocessing
import socket
from importlib.metadata import version

import lightgbm
import numpy as np

SIZES = {0: 100, 10: 900}


def free_ports():
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in SIZES]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def predict(objective, rounds, labels, **options):
    random = np.random.default_rng(1)
    rows = random.integers(0, 2, (len(labels), 1)).astype(float)
    options |= {"objective": objective, "verbose": -1, "num_threads": 1, "min_data_in_leaf": 1}
    model = lightgbm.train(options, lightgbm.Dataset(rows, labels), rounds)
    return model.predict([[0], [1]]).mean()


def run(rank, ports, labels, asked, results):
    options = {"num_machines": 2, "tree_learner": "data", "pre_partition": True, "time_out": 1}
    options["machines"] = ",".join(f"127.0.0.1:{port}" for port in ports)
    results.put(predict(*asked, labels, local_listen_port=ports[rank], **options))


def on_two(parts, asked):
    ports = free_ports()
    results = multiprocessing.SimpleQueue()
    machines = [
        multiprocessing.Process(target=run, args=(rank, ports, labels, asked, results))
        for rank, labels in enumerate(parts)
    ]
    for machine in machines:
        machine.start()
    for machine in machines:
        machine.join()
    return results.get()


if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")
    random = np.random.default_rng(0)
    parts = [random.normal(mean, 1, size) for mean, size in SIZES.items()]
    print("seen: lightgbm", version("lightgbm"))
    for objective in ("regression", "regression_l1", "quantile"):
        for rounds in (10, 300)[objective != "regression":]:
            one = predict(objective, rounds, np.concatenate(parts))
            two = on_two(parts, (objective, rounds))
            print(f"seen: {objective}, {rounds} trees: one machine {one:.1f}, two {two:.1f}")
PYTHON
seen=$(timeout 300 "$python" -W ignore "$folder/train.py" 2>"$errors" | sed -n 's/^seen: //p')
verdict 'two machines find what one finds' "$seen" \
  "lightgbm 4.7.0
regression, 10 trees: one machine 9.0, two 7.6
regression, 300 trees: one machine 9.0, two 9.0
regression_l1, 300 trees: one machine 9.8, two 5.0
quantile, 300 trees: one machine 11.1, two 6.3"
