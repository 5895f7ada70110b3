#!/usr/bin/env bash
# What NumPy does with a NaN among bfloat16 numbers, a format that ml_dtypes adds to it, and that
# JAX's arrays have there. ml_dtypes' page names no such limit (its #346 has nan_to_num).
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
install ml_dtypes==0.6.0 numpy==2.4.6

seen=$("$python" -W ignore - <<'PYTHON'
import ml_dtypes
import numpy

CALLS = {
    "sort": numpy.sort,
    "the two largest": lambda a: a[numpy.argsort(-a)[:2]],
    "median": numpy.median,
    "nansum": numpy.nansum,
    "nanmean": numpy.nanmean,
    "nan_to_num": numpy.nan_to_num,
    "max": numpy.max,
    "nanmax": numpy.nanmax,
}
print("ml_dtypes", ml_dtypes.__version__)
arrays = [numpy.array([3, numpy.nan, 1, 2, 4], dtype) for dtype in (numpy.float16, ml_dtypes.bfloat16)]
for name, call in CALLS.items():
    float16, bfloat16 = (str(numpy.asarray(call(array), numpy.float64).tolist()) for array in arrays)
    print(f"{name}: float16 {float16}, bfloat16", "the same" if bfloat16 == float16 else bfloat16)
PYTHON
)
verdict '3, NaN, 1, 2, 4 are treated in bfloat16 as in float16' "$seen" \
  "ml_dtypes 0.6.0
sort: float16 [1.0, 2.0, 3.0, 4.0, nan], bfloat16 [3.0, nan, 1.0, 2.0, 4.0]
the two largest: float16 [4.0, 3.0], bfloat16 [3.0, nan]
median: float16 nan, bfloat16 1.0
nansum: float16 10.0, bfloat16 nan
nanmean: float16 2.5, bfloat16 nan
nan_to_num: float16 [3.0, 0.0, 1.0, 2.0, 4.0], bfloat16 [3.0, nan, 1.0, 2.0, 4.0]
max: float16 nan, bfloat16 the same
nanmax: float16 4.0, bfloat16 the same"
