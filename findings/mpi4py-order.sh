#!/usr/bin/env bash
# Arrays in Fortran's order, such as the gradient of a transposed weight, and mpi4py's calls for
# arrays. An array that is contiguous in neither order is refused.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
install mpi4py==4.1.2 mpich==5.0.2 numpy==2.4.6

cat >"$folder/order.py" <<'PYTHON'
import mpi4py
import numpy
from mpi4py import MPI

comm = MPI.COMM_WORLD
gradient = numpy.array([[1.0, 2.0], [3.0, 4.0]]).T  # of each of two ranks: [[1, 3], [2, 4]]

total = numpy.empty(gradient.shape)
comm.Allreduce(gradient, total)

gathered = numpy.empty((comm.size, *gradient.shape))
comm.Allgather(gradient, gathered)

weight = gradient.copy(order="C") if comm.rank == 0 else numpy.empty(gradient.shape, order="F")
comm.Bcast(weight)
weights = comm.gather(weight.tolist())

strided = numpy.zeros((2, 4))[:, ::2]
try:
    comm.Allreduce(strided, total.copy())
    refused = "is taken"
except BufferError:
    refused = "is refused"

if comm.rank == 0:
    print("mpi4py", mpi4py.__version__, "of the array", gradient.tolist())
    print("Allreduce:", total.tolist())
    print("Allgather:", *gathered.tolist())
    print("Bcast: ranks have", *weights)
    print("every other column of an array", refused)
PYTHON
seen=$("$folder/environment/bin/mpiexec" -n 2 "$python" "$folder/order.py" 2>"$errors")
verdict 'arrays are exchanged by their indices, or refused: the sum is [[2, 6], [4, 8]]' "$seen" \
  "mpi4py 4.1.2 of the array [[1.0, 3.0], [2.0, 4.0]]
Allreduce: [[2.0, 4.0], [6.0, 8.0]]
Allgather: [[1.0, 2.0], [3.0, 4.0]] [[1.0, 2.0], [3.0, 4.0]]
Bcast: ranks have [[1.0, 3.0], [2.0, 4.0]] [[1.0, 2.0], [3.0, 4.0]]
every other column of an array is refused"
