#!/usr/bin/env bash
# A bag of words that lists a word twice, as that of a title and a text that were put together.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
install gensim==4.4.0 numpy==2.4.6 scipy==1.17.1

seen=$("$python" -W ignore - 2>"$errors" <<'PYTHON'
import gensim
from gensim.matutils import corpus2csc
from gensim.models import LdaModel

WORDS = {0: "loss", 1: "rate", 2: "step"}
APART = [[(0, 5), (0, 3), (1, 2)], [(2, 4), (1, 1), (2, 4)]]
TOGETHER = [[(0, 8), (1, 2)], [(1, 1), (2, 8)]]

print(gensim.__version__)
same = (corpus2csc(APART) != corpus2csc(TOGETHER)).nnz == 0
print("corpus2csc:", "the same counts" if same else "other counts")
for name, corpus in (("apart", APART * 50), ("together", TOGETHER * 50)):
    model = LdaModel(corpus, num_topics=1, id2word=WORDS, random_state=0, passes=20)
    counts = model.state.get_lambda()[0] - model.eta
    print(f"LdaModel, {name}:", ", ".join(f"{WORDS[i]} {n:.0f}" for i, n in enumerate(counts)))
PYTHON
)
verdict 'counts of one word in a document are added up' "$seen" \
  "4.4.0
corpus2csc: the same counts
LdaModel, apart: loss 150, rate 150, step 200
LdaModel, together: loss 400, rate 150, step 400"
