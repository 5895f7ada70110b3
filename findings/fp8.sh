#!/usr/bin/env bash
# What a cast to fp8 makes of numbers that do not fit, in PyTorch and in ml_dtypes.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
install torch==2.13.0 numpy==2.4.6 ml_dtypes==0.6.0

seen=$("$python" -W ignore - <<'PYTHON'
import ml_dtypes
import numpy as np
import torch

E4M3, E5M2 = [448, 464, 465, 1000, np.inf, np.nan], [57344, 61440, np.inf, np.nan]
print(torch.__version__.split("+")[0], ml_dtypes.__version__)
for name, values in (("float8_e4m3fn", E4M3), ("float8_e5m2", E5M2)):
    array = np.array(values, np.float32)
    print(name, "of", *array)
    print("  torch:", *torch.from_numpy(array).to(getattr(torch, name)).float().numpy())
    print("  ml_dtypes:", *array.astype(getattr(ml_dtypes, name)).astype(np.float32))
PYTHON
)
verdict 'e4m3 has no infinity, so what does not fit becomes NaN, in both' "$seen" \
  "2.13.0 0.6.0
float8_e4m3fn of 448.0 464.0 465.0 1000.0 inf nan
  torch: 448.0 448.0 448.0 448.0 448.0 nan
  ml_dtypes: 448.0 448.0 nan nan nan nan
float8_e5m2 of 57344.0 61440.0 inf nan
  torch: 57344.0 inf inf nan
  ml_dtypes: 57344.0 inf inf nan"
