"""The trainer that ``onnxruntime.training`` had until 2023, ``ORTTrainer(model, model_desc, optim_config)``.

``from onnxruntime.training import ORTTrainer, ORTTrainerOptions, optim, amp, checkpoint`` becomes ``from
ortmodule_c.training import ...``. Checkpoints need the package h5py, which nothing else of this package imports.
"""

from . import amp, checkpoint, optim
from .info import TrainStepInfo
from .options import ORTTrainerOptions
from .trainer import ORTTrainer

__all__ = ["ORTTrainer", "ORTTrainerOptions", "TrainStepInfo", "amp", "checkpoint", "optim"]
