"""A policy of torchrl, whose distributions ask whether they are compiled."""

import copy

import torch
from torch import Tensor, nn

from ortmodule_c import ORTModule
from side_by_side import assert_ran_in_core, library
from wrapped import assert_same_step

modules = library("torchrl.modules")


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(modules.MLP(4, 4, num_cells=[8]), modules.NormalParamExtractor())

    def forward(self, x: Tensor, action: Tensor) -> Tensor:
        log_prob: Tensor = modules.TanhNormal(*self.net(x)).log_prob(action)
        return log_prob


def test_log_probabilities() -> None:
    eager = Policy()
    ours = ORTModule(copy.deepcopy(eager))
    for batch in (3, 4):
        assert_same_step(eager, ours, torch.randn(batch, 4), torch.rand(batch, 2) - 0.5)
    functions = [f"torchrl.modules.distributions.utils.{name}" for name in ("_SafeTanhNoEps", "_SafeaTanhNoEps")]
    assert_ran_in_core(ours, ops_in_pytorch=functions)
