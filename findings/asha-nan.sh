#!/usr/bin/env bash
# Ray Tune's ASHA, which stops early what is worse than others, when a trial's loss is NaN. Its page
# does not speak of NaN; ResultGrid.get_best_result leaves NaN out, and Optuna's MedianPruner and
# SuccessiveHalvingPruner end such a trial at once.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
install 'ray[tune]==2.60.0' numpy==2.4.6

seen=$(RAY_USAGE_STATS_ENABLED=0 RAY_AIR_NEW_OUTPUT=0 "$python" -W ignore - "$folder" 2>"$errors" <<'PYTHON'
import logging
import sys

import ray
from ray import tune
from ray.tune.schedulers import ASHAScheduler

LOSSES = [0.1, 0.2, 0.3, float("nan"), 0.4]


class Trial(tune.Trainable):
    def setup(self, config):
        self.loss = LOSSES[config["number"]]

    def step(self):
        return {"loss": self.loss}

    def save_checkpoint(self, folder):
        pass

    def load_checkpoint(self, checkpoint):
        pass


quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": logging.ERROR}
ray.init(num_cpus=1, _temp_dir=sys.argv[1] + "/ray", **quiet)
tuner = tune.Tuner(  # one trial after the other
    tune.with_resources(Trial, {"cpu": 1}),
    param_space={"number": tune.grid_search(list(range(len(LOSSES))))},
    tune_config=tune.TuneConfig(metric="loss", mode="min", scheduler=ASHAScheduler(grace_period=1, max_t=16)),
    run_config=tune.RunConfig(storage_path=sys.argv[1], verbose=0),
)
iterations = {result.config["number"]: result.metrics["training_iteration"] for result in tuner.fit()}
print("Ray", ray.__version__)
print("of 16 iterations run:", ", ".join(f"{iterations[n]} with the loss {loss}" for n, loss in enumerate(LOSSES)))
ray.shutdown()
PYTHON
)
verdict 'a trial whose loss is NaN is stopped before those that have a loss' "$seen" \
  "Ray 2.60.0
of 16 iterations run: 16 with the loss 0.1, 1 with the loss 0.2, 1 with the loss 0.3, 16 with the loss nan, 1 with the loss 0.4"
