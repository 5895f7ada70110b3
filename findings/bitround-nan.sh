#!/usr/bin/env bash
# Numbers that are rounded to fewer bits before they are compressed (numcodecs' BitRound, for zarr),
# when one is NaN. NVIDIA's GPUs make the NaN 0x7fffffff (PTX ISA), a processor 0x7fc00000.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
install numcodecs==0.16.6 numpy==2.4.6

seen=$("$python" -W ignore - 2>"$errors" <<'PYTHON'
import numcodecs
import numpy

KINDS = {
    "a processor's": [("uint32", "float32", 0x7FC00000), ("uint16", "float16", 0x7E00)],
    "a GPU's": [("uint32", "float32", 0x7FFFFFFF), ("uint16", "float16", 0x7FFF)],
    "another": [("uint32", "float32", 0x7F800001), ("uint16", "float16", 0x7C01)],
}
print("numcodecs", numcodecs.__version__)
for kind, arrays in KINDS.items():
    for bits, numbers, nan in arrays:
        array = numpy.array([nan], bits).view(numbers)
        assert numpy.isnan(array).all()
        codec = numcodecs.BitRound(keepbits=7)
        print(f"{kind} NaN, {numbers}:", codec.decode(codec.encode(array.copy())).view(numbers)[0])
PYTHON
)
verdict 'a NaN remains one' "$seen" \
  "numcodecs 0.16.6
a processor's NaN, float32: nan
a processor's NaN, float16: nan
a GPU's NaN, float32: -0.0
a GPU's NaN, float16: -0.0
another NaN, float32: inf
another NaN, float16: inf"
