"""Models of timm, torchvision and others, a step of each; float64, as batch norms of few elements magnify rounding."""

import copy

import pytest
import torch
from torch import nn

from ortmodule_c import ORTModule
from side_by_side import assert_ran_in_core, library
from wrapped import assert_same_step

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def assert_trains(model: nn.Module, size: int, *ops_in_pytorch: str) -> None:
    for m in model.modules():
        for name in ("p", "drop_prob"):  # of dropout and stochastic depth
            if isinstance(getattr(m, name, None), float):
                setattr(m, name, 0.0)
    ours = ORTModule(copy.deepcopy(model.double()))
    assert_same_step(model, ours, torch.randn(2, 3, size, size, dtype=torch.float64))
    assert_ran_in_core(ours, ops_in_pytorch=ops_in_pytorch)


@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v3_small", "shufflenet_v2_x0_5", "squeezenet1_1"])
def test_torchvision(name: str) -> None:
    assert_trains(library("torchvision").models.get_model(name, weights=None), 64)


@pytest.mark.parametrize("name", ["resnet10t", "test_vit", "test_convnext", "test_efficientnet"])
def test_timm(name: str) -> None:
    assert_trains(library("timm").create_model(name), 160, "aten._upsample_bicubic2d_aa.vec")


def test_segmentation_models() -> None:
    assert_trains(library("segmentation_models_pytorch").Unet("resnet18", encoder_weights=None), 32)


def test_kornia() -> None:
    kornia = library("kornia")

    class Blurred(nn.Conv2d):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = kornia.filters.gaussian_blur2d(super().forward(x).sigmoid(), (3, 3), (1.5, 1.5))
            return kornia.losses.ssim_loss(y, x.sigmoid(), 5)

    assert_trains(Blurred(3, 3, 3, padding=1), 16)
