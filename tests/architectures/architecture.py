"""One model of transformers, made small, and what makes a step of its training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import transformers
from batches import Batch
from torch import nn


@dataclass(frozen=True)
class Architecture:
    """One row of the table.

    Attributes
    ----------
    model
        Name of the class in transformers.
    batch
        Makes the arguments of a step of this batch size and length.
    config
        What is not as the configuration has it by itself.
    """

    model: str
    batch: Batch
    config: dict[str, Any]

    def build(self) -> nn.Module:
        """The model in train mode.

        Dropout, whose random numbers are others in C, is off; what else is drawn is drawn by PyTorch on both sides.
        """
        cls = getattr(transformers, self.model)
        torch.manual_seed(0)
        model = cls(cls.config_class(**self.config)).train()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
            for name, value in vars(module).items():
                if "drop" in name and name not in ("layerdrop", "drop_prob") and isinstance(value, float):
                    setattr(module, name, 0.0)
        return model
