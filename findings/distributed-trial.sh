#!/usr/bin/env bash
# A search of hyperparameters whose trials run on two ranks: Optuna's TorchDistributedTrial gives
# all of them what rank 0 has drawn. Its page says that it has the interface of a Trial.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
install torch==2.13.0 optuna==5.0.0 optuna-integration==5.0.0 numpy==2.4.6

cat >"$folder/search.py" <<'PYTHON'
import sys
from importlib.metadata import version

import optuna
import torch.distributed as dist
import torch.multiprocessing
from optuna_integration import TorchDistributedTrial

TRIAL = {"rate": 0.1, "beta": 1 - 1e-9, "decay": 1e-50}


def objective(trial):
    trial = TorchDistributedTrial(trial)
    used = {
        "rate": trial.suggest_float("rate", 1e-5, 0.1, log=True),
        "beta": trial.suggest_float("beta", 0.9, 1 - 1e-9),
        "decay": trial.suggest_float("decay", 1e-50, 1, log=True),
    }
    if dist.get_rank() == 0:
        for name, value in used.items():
            bound = "" if value <= trial.distributions[name].high else ", above its bound"
            stored = trial.params[name]
            print(f"{name}: the study has {stored!r}, ranks train with {value!r}{bound}")
    return 0.0


def run(rank, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    if rank == 0:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        study = optuna.create_study()
        study.enqueue_trial(TRIAL)
        study.optimize(objective, n_trials=1)
    else:
        objective(None)
    dist.destroy_process_group()


if __name__ == "__main__":
    print("optuna-integration", version("optuna-integration"), flush=True)
    torch.multiprocessing.spawn(run, (sys.argv[1],), 2)
PYTHON
seen=$("$python" -W ignore "$folder/search.py" "$folder/store" 2>"$errors")
verdict 'ranks train with the number that the study has, within its bounds' "$seen" \
  "optuna-integration 5.0.0
rate: the study has 0.1, ranks train with 0.10000000149011612, above its bound
beta: the study has 0.999999999, ranks train with 1.0, above its bound
decay: the study has 1e-50, ranks train with 0.0"
