#!/usr/bin/env bash
# PageRank with a page that has no links, beside four that link to one another in a ring; and a page
# with a link of weight 9 and one of weight 1. NetworkX is the reference.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
install scikit-network==0.33.5 networkx==3.6.1 numpy==2.4.6 scipy==1.17.1

seen=$("$python" -W ignore - 2>"$errors" <<'PYTHON'
from importlib.metadata import version

import networkx
import scipy.sparse
from sknetwork.ranking import PageRank

GRAPHS = {
    "no links": [(0, 1, 1), (1, 2, 1), (2, 3, 1), (3, 0, 1)],
    "weights": [(0, 1, 9), (0, 2, 1), (1, 0, 1), (2, 0, 1), (3, 0, 1), (4, 0, 1)],
}


def text(scores):
    return " ".join(f"{score:.2f}" for score in scores)


print("scikit-network", version("scikit-network"))
for name, links in GRAPHS.items():
    graph = networkx.DiGraph()
    graph.add_nodes_from(range(5))
    graph.add_weighted_edges_from(links)
    matrix = scipy.sparse.csr_matrix(networkx.to_scipy_sparse_array(graph, dtype=float))
    reference = networkx.pagerank(graph, max_iter=1000)
    print(f"{name}, NetworkX: {text(reference[page] for page in range(5))}")
    for solver in ("piteration", "lanczos", "RH", "push"):
        scores = PageRank(solver=solver, n_iter=200).fit_predict(matrix)
        print(f"{name}, {solver}: {text(scores)}")
PYTHON
)
verdict 'all solvers find the same ranks, to 1%' "$seen" \
  "scikit-network 0.33.5
no links, NetworkX: 0.24 0.24 0.24 0.24 0.04
no links, piteration: 0.20 0.20 0.20 0.20 0.20
no links, lanczos: 0.20 0.20 0.20 0.20 0.20
no links, RH: 0.24 0.24 0.24 0.24 0.04
no links, push: 0.21 0.23 0.23 0.23 0.10
weights, NetworkX: 0.48 0.39 0.07 0.03 0.03
weights, piteration: 0.48 0.39 0.07 0.03 0.03
weights, lanczos: 0.48 0.39 0.07 0.03 0.03
weights, RH: 0.48 0.39 0.07 0.03 0.03
weights, push: 0.54 0.12 0.12 0.11 0.11"
