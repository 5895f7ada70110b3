"""Flower's FedAvg over the learners' arrays."""

import time

import numpy as np
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from shapes import check, shapes

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    parts, rounds, ranks = (int(context.run_config[name]) for name in ("parts", "rounds", "ranks"))
    began = time.monotonic()

    def after(round: int, arrays: ArrayRecord) -> None:
        nonlocal began
        if round > 0:
            print("SECONDS", time.monotonic() - began, flush=True)
            check(arrays.to_numpy_ndarrays(), round, ranks)
        began = time.monotonic()

    strategy = FedAvg(
        fraction_train=1.0, fraction_evaluate=0.0, min_train_nodes=ranks, min_available_nodes=ranks
    )
    initial = ArrayRecord([np.zeros(shape, np.float32) for shape in shapes(parts)])
    strategy.start(grid=grid, initial_arrays=initial, num_rounds=rounds, evaluate_fn=after)
