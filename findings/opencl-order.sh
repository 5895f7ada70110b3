#!/usr/bin/env bash
# Arrays of PyOpenCL, one of them transposed, here on a processor (PoCL). It is known since 2021
# (pyopencl #527, #681, open). An array that is contiguous in neither order is refused.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
install pyopencl==2026.1.4 pocl-binary-distribution==3.0 numpy==2.4.6

seen=$(XDG_CACHE_HOME=$folder POCL_CACHE_DIR=$folder "$python" -W ignore - 2>"$errors" <<'PYTHON'
import numpy
import pyopencl
import pyopencl.array

devices = [device for platform in pyopencl.get_platforms() for device in platform.get_devices()]
queue = pyopencl.CommandQueue(pyopencl.Context(devices[:1]))
host = numpy.array([[1, 2], [3, 4]], numpy.float32)
array = pyopencl.array.to_device(queue, host)
same = pyopencl.array.to_device(queue, numpy.asfortranarray(host))


def is_refused(function):
    try:
        return f"is {function().get().tolist()}"
    except NotImplementedError:
        return "is refused"


print("PyOpenCL", pyopencl.VERSION_TEXT, "with x =", host.tolist())
print("x + x.T is", (array + array.T).get().tolist())
print("x - x.T is", (array - array.T).get().tolist())
print("x plus x in Fortran's order is", (array + same).get().tolist())
print("minimum(x, x.T) is", pyopencl.array.minimum(array, array.T).get().tolist())
print("x[:, ::2] + x[:, ::2]", is_refused(lambda: array[:, ::2] + array[:, ::2]))
PYTHON
)
verdict 'x + x.T is [[2, 5], [5, 8]], or is refused' "$seen" \
  "PyOpenCL 2026.1.4 with x = [[1.0, 2.0], [3.0, 4.0]]
x + x.T is [[2.0, 4.0], [6.0, 8.0]]
x - x.T is [[0.0, 0.0], [0.0, 0.0]]
x plus x in Fortran's order is [[2.0, 5.0], [5.0, 8.0]]
minimum(x, x.T) is [[1.0, 2.0], [3.0, 4.0]]
x[:, ::2] + x[:, ::2] is refused"
