#!/usr/bin/env bash
# Logistic regression with a penalty by two solvers of dask-ml, for the same weights. Its page says
# that the penalty is for admm, lbfgs and proximal_grad.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
install dask-ml==2025.1.0 dask-glm==0.4.0 dask==2026.8.0 distributed==2026.8.0 \
  scikit-learn==1.9.1 numpy==2.4.6

seen=$("$python" -W ignore - 2>"$errors" <<'PYTHON'
from importlib.metadata import version

import dask
import dask.array
import numpy as np
from dask_ml.linear_model import LogisticRegression
from sklearn.linear_model import LogisticRegression as Reference

ROWS = 1000

print("dask-ml", version("dask-ml"), "dask-glm", version("dask-glm"))
dask.config.set(scheduler="sync")
random = np.random.default_rng(0)
rows = random.normal(size=(ROWS, 2))
labels = (rows[:, 0] + random.normal(size=ROWS) / 2 > 0.5).astype(int)
chunks = dask.array.from_array(rows, chunks=(250, 2)), dask.array.from_array(labels, chunks=250)
for strength in (1, 0.1, 0.01):
    weights = {"scikit-learn": Reference(C=strength, fit_intercept=False, tol=1e-8).fit(rows, labels).coef_}
    for solver in ("admm", "proximal_grad"):
        model = LogisticRegression(C=strength, solver=solver, fit_intercept=False, max_iter=1000, tol=1e-9)
        weights[solver] = model.fit(*chunks).coef_
    print(f"C={strength}:", ", ".join(f"{name} {np.ravel(found)[0]:.1f}" for name, found in weights.items()))
PYTHON
)
verdict 'proximal_grad finds the weights that the other solvers find' "$seen" \
  "dask-ml 2025.1.0 dask-glm 0.4.0
C=1: scikit-learn 2.2, admm 2.2, proximal_grad 2.3
C=0.1: scikit-learn 1.9, admm 1.9, proximal_grad 2.3
C=0.01: scikit-learn 1.1, admm 1.0, proximal_grad 2.0"
