"""Models of torch_geometric, of which each step has other numbers of nodes and edges."""

import pytest
import torch
from torch import Tensor, nn

from side_by_side import assert_ran_in_core, library
from wrapped import assert_same_steps

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def graph(n_nodes: int, n_edges: int) -> tuple[Tensor, Tensor]:
    """Features of the nodes, and edges between them."""
    return torch.randn(n_nodes, 8, dtype=torch.float64), torch.randint(0, n_nodes, (2, n_edges))


@pytest.mark.parametrize("name", ["GIN", "GraphSAGE"])
def test_layers_of_messages(name: str) -> None:
    model: nn.Module = getattr(library("torch_geometric.nn"), name)(8, 16, 2, 3)
    assert_ran_in_core(assert_same_steps(model.double(), graph(12, 30), graph(12, 30), graph(17, 41)))


def test_layers_of_which_the_graph_gets_loops_break_there_alone() -> None:
    model = library("torch_geometric.nn").GAT(8, 16, 2, 3).double()
    ours = assert_same_steps(model, graph(12, 30), graph(12, 30), graph(17, 41))
    assert ours.stats()["graphs"] >= 1
    files = {r.name.rsplit("/", 1)[-1].split(":")[0] for r in ours.fallback_report()}
    assert files <= {"loop.py", "basic_gnn.py"}  # where they are added, and the loop over the layers around that
