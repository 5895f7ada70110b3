#!/usr/bin/env bash
# A matrix of likes in which SciPy stores some zeros, as it does where a program sets elements to 0.
# Its documentation says that nonzero elements are likes.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
install implicit==0.7.3 numpy==2.4.6 scipy==1.17.1

export OPENBLAS_NUM_THREADS=1
seen=$("$python" -W ignore - 2>"$errors" <<'PYTHON'
from importlib.metadata import version

import numpy
import scipy.sparse
from implicit.bpr import BayesianPersonalizedRanking

USERS, ITEMS = 200, 60
# Users like items of their own kind, even or odd, and took their likes of the other kind back.
kind = numpy.arange(USERS)[:, None] % 2 == numpy.arange(ITEMS) % 2
seldom = numpy.random.default_rng(0).random((USERS, ITEMS)) < 0.3
likes = scipy.sparse.csr_matrix(seldom.astype(numpy.float32))
rows = numpy.repeat(numpy.arange(USERS), numpy.diff(likes.indptr))
likes.data[~kind[rows, likes.indices]] = 0
without = likes.copy()
without.eliminate_zeros()

print("implicit", version("implicit"))
print("the matrices are", "equal" if abs(likes - without).sum() == 0 else "different")
for name, matrix in (("stored zeros", likes), ("no stored zeros", without)):
    model = BayesianPersonalizedRanking(factors=8, num_threads=1, random_state=0, use_gpu=False)
    model.fit(matrix, show_progress=False)
    items, _ = model.recommend(numpy.arange(USERS), without, N=5)
    wrong = numpy.mean(items % 2 != numpy.arange(USERS)[:, None] % 2)
    verdict = "none" if wrong == 0 else "more than half" if wrong > 0.5 else f"{wrong:.0%}"
    print(f"{name}: {verdict} of what it recommends is of the other kind")
PYTHON
)
verdict 'a stored zero is as no element, in equal matrices' "$seen" \
  "implicit 0.7.3
the matrices are equal
stored zeros: more than half of what it recommends is of the other kind
no stored zeros: none of what it recommends is of the other kind"
