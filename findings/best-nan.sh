#!/usr/bin/env bash
# Keeping the best checkpoints when one evaluation gives NaN: Orbax's CheckpointManager with
# best_fn, Ignite's Checkpoint with score_function. Ray Train and Lightning take NaN for the worst.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
install orbax-checkpoint==0.12.8 jax==0.10.2 pytorch-ignite==0.5.5 torch==2.13.0 numpy==2.4.6

seen=$(JAX_PLATFORMS=cpu "$python" -W ignore - "$folder" 2>"$errors" <<'PYTHON'
import os
import sys
import tempfile
from importlib.metadata import version

import numpy
import orbax.checkpoint as orbax
import torch
from ignite.engine import Engine
from ignite.handlers import Checkpoint, DiskSaver

NAN = float("nan")


def by_orbax(losses):
    """The loss of the checkpoint that is kept, and of the one that is said to be the best."""
    options = orbax.CheckpointManagerOptions(
        max_to_keep=1, best_fn=lambda metrics: metrics["loss"], best_mode="min"
    )
    model = orbax.args.StandardSave({"weight": numpy.ones(2)})
    with orbax.CheckpointManager(tempfile.mkdtemp(dir=sys.argv[1]), options=options) as manager:
        for step, loss in enumerate(losses):
            manager.save(step, args=model, metrics={"loss": loss})
            manager.wait_until_finished()
        kept = [losses[step] for step in manager.all_steps()]
        return f"keeps {kept}, its best is {losses[manager.best_step()]}"


def by_ignite(accuracies):
    engine = Engine(lambda engine, batch: None)
    keeper = Checkpoint(
        {"model": torch.nn.Linear(1, 1)},
        DiskSaver(tempfile.mkdtemp(dir=sys.argv[1])),
        n_saved=1,
        score_name="accuracy",
        score_function=lambda engine: accuracies[engine.state.step],
    )
    for step in range(len(accuracies)):
        engine.state.step = engine.state.iteration = step
        keeper(engine)
    return f"keeps {os.path.basename(keeper.last_checkpoint)}"


print("Orbax", version("orbax-checkpoint"), "with losses")
for losses in ([3.0, 2.0, 1.0, 4.0], [3.0, 2.0, 1.0, NAN], [1.0, NAN, 3.0, 2.0]):
    print(f"{losses}: {by_orbax(losses)}")
print("Ignite", version("pytorch-ignite"), "with accuracies")
for accuracies in ([0.1, 0.5, 0.9], [NAN, 0.5, 0.9]):
    print(f"{accuracies}: {by_ignite(accuracies)}")
PYTHON
)
verdict 'of checkpoints with a number the best one is kept' "$seen" \
  "Orbax 0.12.8 with losses
[3.0, 2.0, 1.0, 4.0]: keeps [1.0], its best is 1.0
[3.0, 2.0, 1.0, nan]: keeps [nan], its best is nan
[1.0, nan, 3.0, 2.0]: keeps [2.0], its best is 2.0
Ignite 0.5.5 with accuracies
[0.1, 0.5, 0.9]: keeps model_accuracy=0.9000.pt
[nan, 0.5, 0.9]: keeps model_accuracy=nan.pt"
