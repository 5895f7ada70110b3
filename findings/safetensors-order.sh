#!/usr/bin/env bash
# Arrays in Fortran's order, such as the transpose of a weight, in a safetensors file
# (safetensors #825).
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
install safetensors==0.8.0 numpy==2.4.6

seen=$("$python" - "$folder/file.safetensors" <<'PYTHON'
import sys

import numpy
import safetensors
from safetensors.numpy import load_file, save_file

weight = numpy.arange(6).reshape(2, 3)
print(safetensors.__version__)
for name, array in (("in C's order", weight), ("in Fortran's", numpy.asfortranarray(weight)), ("transposed", weight.T)):
    try:
        save_file({"weight": array}, sys.argv[1])
        print(name, array.tolist(), "comes back as", load_file(sys.argv[1])["weight"].tolist())
    except ValueError:
        print(name, array.tolist(), "is refused")
PYTHON
)
verdict 'each array comes back as it was, or is refused, as safetensors.torch does' "$seen" \
  "0.8.0
in C's order [[0, 1, 2], [3, 4, 5]] comes back as [[0, 1, 2], [3, 4, 5]]
in Fortran's [[0, 1, 2], [3, 4, 5]] comes back as [[0, 3, 1], [4, 2, 5]]
transposed [[0, 3], [1, 4], [2, 5]] comes back as [[0, 1], [2, 3], [4, 5]]"
