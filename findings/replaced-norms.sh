#!/usr/bin/env bash
# Word vectors of gensim of which one is replaced, after somebody has asked for similar words. That
# most_similar() fails after a vector was added is known: gensim #3224.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
install gensim==4.4.0 numpy==2.4.6 scipy==1.17.1

seen=$("$python" -W ignore - 2>"$errors" <<'PYTHON'
import gensim
import numpy as np
from gensim.models import KeyedVectors

print(gensim.__version__)
for asked in (False, True):
    vectors = KeyedVectors(2)
    vectors.add_vectors(["rate", "step", "loss"], np.array([[1, 0], [1, 1], [0, 1]], np.float32))
    if asked:
        vectors.most_similar("rate")
    vectors.add_vectors(["loss"], np.array([[3, 30]], np.float32), replace=True)
    similar = ", ".join(f"{word} {cosine:.2f}" for word, cosine in vectors.most_similar("rate"))
    print("asked before:" if asked else "not asked:", similar)
PYTHON
)
verdict 'a cosine is of the vectors that are there, and at most 1' "$seen" \
  "4.4.0
not asked: step 0.71, loss 0.10
asked before: loss 3.00, step 0.71"
