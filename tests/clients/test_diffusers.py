"""Layers of diffusers, which ask at each call which PyTorch is installed, and remember it."""

import copy

import torch

from ortmodule_c import DebugOptions, ORTModule
from side_by_side import assert_ran_in_core, library
from wrapped import assert_same_step

upsampling = library("diffusers.models.upsampling")


def test_what_is_installed_is_no_reason_to_refuse() -> None:
    eager = upsampling.Upsample2D(4, use_conv=True)
    ours = ORTModule(copy.deepcopy(eager), DebugOptions(capture="export"))
    for batch in (2, 3):
        assert_same_step(eager, ours, torch.randn(batch, 4, 6, 6))
    assert_ran_in_core(ours)
