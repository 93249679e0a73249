"""Where a function has as many graphs as TorchDynamo may make of it, nobody runs what was made for others."""

import copy
import gc
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import config

from ortmodule_c import DebugOptions, ORTModule, ORTModuleError
from wrapped import Branching, assert_same_step, close, pair

pytestmark = [pytest.mark.usefixtures("fresh_dynamo"), pytest.mark.any_pytorch]
OLD = torch.__version__ < "2.13"
TOLD = (
    f"Scaled runs in PyTorch: graphs by TorchDynamo need PyTorch 2.13 or newer, and this is {torch.__version__}"
    if OLD
    else "forward needs more than 2 graphs"
)


class Scaled(nn.Module):
    """Has a graph for each text that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(4, 4)

    def forward(self, x: Tensor, scale: str) -> Tensor:
        return self.l(x) * int(scale)


def test_wrappers_and_what_the_user_compiles_of_a_class_meet_limits_of_their_own() -> None:
    """... from PyTorch 2.13 on. Before, one warning says so, and PyTorch runs the module."""
    ran: list[Any] = []

    def backend(graph: Any, _: Any) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            ran.append(graph)
            return graph(*args)

        return run

    x, users = torch.randn(3, 4), Scaled()
    compiled = torch.compile(users, backend=backend)
    with config.patch(recompile_limit=2):
        for scale in "123":
            close(compiled(x, scale), users(x, scale))
    assert len(ran) == 2
    ran.clear()
    for _ in range(2):  # the graphs of the first wrapper are gone when the second runs
        eager = Scaled()
        ours = ORTModule(copy.deepcopy(eager), DebugOptions(capture="dynamo", max_graphs=2))
        with pytest.warns(UserWarning, match=re.escape(TOLD)) as told:
            for scale in "45614":  # not the tensor of the user, on which is noted what sizes are open
                assert_same_step(eager, ours, x.clone(), scale)
        assert len(told) == 1 and not ran
        assert ours.stats()["dynamo_graphs"] == (0 if OLD else 2)
        del ours
        gc.collect()
    for scale in "12":
        close(compiled(x, scale), users(x, scale))
    assert len(ran) == 2


@pytest.mark.skipif(not OLD, reason="TorchDynamo makes graphs of it from PyTorch 2.13 on")
def test_what_export_refuses_runs_in_pytorch_and_both_reasons_are_told() -> None:
    eager, ours = pair(Branching())
    with pytest.warns(UserWarning, match=r"Branching runs in PyTorch: .+; graphs by TorchDynamo need PyTorch 2\.13"):
        assert_same_step(eager, ours, torch.ones(2, 4))
    strict = ORTModule(Branching(), DebugOptions(fallback="error"))
    with pytest.raises(ORTModuleError, match=r"graphs by TorchDynamo need PyTorch 2\.13"):
        strict(torch.ones(2, 4))
