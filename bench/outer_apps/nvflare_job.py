"""NVFlare's simulator, a process for the server and each learner: nvflare_job.py PARTS ROUNDS RANKS FOLDER."""

import math
import sys
from pathlib import Path

import numpy as np
from nvflare.app_common.np.recipes.fedavg import NumpyFedAvgRecipe
from nvflare.recipe import SimEnv
from shapes import shapes

parts, rounds, ranks = (int(word) for word in sys.argv[1:4])
folder = Path(sys.argv[4])
elements = sum(math.prod(shape) for shape in shapes(parts))
np.save(folder / "initial.npy", np.zeros(elements, np.float32))
recipe = NumpyFedAvgRecipe(
    name="outer",
    initial_ckpt=str(folder / "initial.npy"),
    min_clients=ranks,
    num_rounds=rounds + 1,  # the last only shows the learners what came of the one before
    train_script="nvflare_client.py",
    train_args=f"{parts} {ranks}",
)
recipe.execute(SimEnv(num_clients=ranks, workspace_root=str(folder / "workspace")))
