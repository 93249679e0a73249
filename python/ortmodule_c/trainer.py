"""The trainers of Hugging Face's transformers with the model in the C core, under the names that Optimum had for them.

Needs transformers and accelerate, which nothing else of this package imports.
"""

from __future__ import annotations

import enum
import inspect
import warnings
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from transformers import (
    PreTrainedModel,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainingArguments,
)
from transformers.trainer_pt_utils import LabelSmoother

from .optim import FusedAdam
from .options import DebugOptions, LogLevel
from .ortmodule import ORTModule


class ORTOptimizerNames(enum.StrEnum):
    """Values of ``optim`` that transformers does not have."""

    ADAMW_ORT_FUSED = "adamw_ort_fused"
    """:class:`ortmodule_c.optim.FusedAdam`, as ``torch.optim.AdamW``."""


@dataclass
class ORTTrainingArguments(TrainingArguments):
    """The arguments of :class:`ORTTrainer`: those of ``transformers.TrainingArguments`` and those below.

    Parameters
    ----------
    optim
        ``"adamw_ort_fused"`` too, which is :class:`ortmodule_c.optim.FusedAdam`.
    use_module_with_loss
        Has no effect: losses are computed in the C core in any case, with label smoothing too.
    save_onnx, onnx_prefix
        Write the graphs as ONNX files to `output_dir`, under names that begin so.
    onnx_log_level
        Threshold of the logger ``ortmodule_c``, such as ``"INFO"``; by default as it is.
    memory_budget
        As of :class:`ortmodule_c.ORTModule`, a share.

    Raises
    ------
    ValueError
        If `optim` is neither of transformers nor of ours, or `optim_args` are given with ours.
    """

    optim: str = field(
        default=TrainingArguments.optim,
        metadata={"help": "The optimizer to use: one of those of transformers, or adamw_ort_fused."},
    )
    use_module_with_loss: bool = field(
        default=False, metadata={"help": "Taken for the sake of Optimum's users: losses are computed in the core."}
    )
    save_onnx: bool = field(
        default=False, metadata={"help": "Write the exported, the joint and the optimized graph to `output_dir`."}
    )
    onnx_prefix: str | None = field(
        default=None, metadata={"help": "First part of the names of these files; required with `save_onnx`."}
    )
    onnx_log_level: str | None = field(
        default=None, metadata={"help": f"Threshold of the logger ortmodule_c: {', '.join(LogLevel.__members__)}."}
    )
    memory_budget: float | None = field(
        default=None,
        metadata={"help": "Share, from 0.0 to 1.0, of the memory that a step would take for what it computes."},
    )

    def __post_init__(self) -> None:
        ours = self.optim if self.optim in {*ORTOptimizerNames} else None
        if ours is not None:
            if self.optim_args:
                raise ValueError(f"optim_args are {self.optim_args!r}, of which optim={str(ours)!r} takes none")
            self.optim = TrainingArguments.optim  # one that transformers knows
        super().__post_init__()
        if ours is not None:
            self.optim = ORTOptimizerNames(ours)

    def debug_options(self) -> DebugOptions:
        """Those of the wrapper."""
        return DebugOptions(
            log_level=self.onnx_log_level,
            save_onnx=self.save_onnx,
            onnx_prefix=self.onnx_prefix or "",
            save_path=(self.output_dir or "") if self.save_onnx else "",
        )


@dataclass
class ORTSeq2SeqTrainingArguments(ORTTrainingArguments, Seq2SeqTrainingArguments):
    """The arguments of :class:`ORTSeq2SeqTrainer`, as :class:`ORTTrainingArguments` are of :class:`ORTTrainer`."""


class _SmoothedLoss(nn.Module):
    """The loss of a ``LabelSmoother`` as a module."""

    def __init__(self, smoother: LabelSmoother) -> None:
        super().__init__()
        self._smoother: Any = smoother

    def forward(self, logits: Tensor, labels: Tensor, shift_labels: bool, items: Tensor | int | None) -> Tensor:
        loss: Tensor = self._smoother((logits,), labels, shift_labels=shift_labels, num_items_in_batch=items)
        return loss


class _LabelSmoother(LabelSmoother):
    """A ``LabelSmoother`` that computes its loss in the C core."""

    def __init__(self, smoother: LabelSmoother) -> None:
        super().__init__(smoother.epsilon, smoother.ignore_index)
        self._loss = ORTModule(_SmoothedLoss(smoother))

    def __call__(
        self, model_output: Any, labels: Tensor, shift_labels: bool = False, num_items_in_batch: Any = None
    ) -> Tensor:
        logits = model_output["logits"] if isinstance(model_output, dict) else model_output[0]
        loss: Tensor = self._loss(logits, labels, shift_labels, num_items_in_batch)
        return loss


class ORTTrainer(Trainer):
    """``transformers.Trainer`` whose model runs in the C core, as an :class:`ortmodule_c.ORTModule`.

    It takes what that takes, in the same order, a model or `model_init`, and :class:`ORTTrainingArguments` or
    ``TrainingArguments``. Checkpoints are those of the plain model, and either trainer goes on from those of the other.
    Where the trainer reads nothing but the loss of a training step, as it does unless `compute_loss` or `training_step`
    is overridden, `compute_loss_func` is given or labels are smoothed, nothing else is computed for it. A model that is
    an ORTModule is taken as it is.

    Examples
    --------
    >>> args = ORTTrainingArguments("out", optim="adamw_ort_fused", memory_budget=0.5)
    >>> ORTTrainer(model, args, train_dataset=data).train()
    """

    _arguments: type[ORTTrainingArguments] = ORTTrainingArguments

    def __init__(
        self, model: nn.Module | None = None, args: TrainingArguments | None = None, *more: Any, **named: Any
    ) -> None:
        args = self._arguments("tmp_trainer") if args is None else args
        if args.n_gpu > 1:
            warnings.warn(f"one process trains on one of {args.n_gpu} GPUs; torchrun starts one for each", stacklevel=2)
            args._n_gpu = 1
        given = inspect.signature(Trainer).bind_partial(model, args, *more, **named).arguments
        self._reads_loss_alone = (
            type(self).compute_loss is Trainer.compute_loss
            and type(self).training_step is Trainer.training_step
            and args.label_smoothing_factor == 0
            and given.get("compute_loss_func") is None
        )
        self._given = args
        super().__init__(model if model is None else self._wrapped(model), args, *more, **named)
        if self.label_smoother is not None:
            self.label_smoother: Any = _LabelSmoother(self.label_smoother)

    def _wrapped(self, model: nn.Module) -> ORTModule:
        if isinstance(model, ORTModule):
            return model
        outputs = ["loss"] if self._reads_loss_alone and _gives_loss_by_name(model) else None
        if not isinstance(self._given, ORTTrainingArguments):
            return ORTModule(model, outputs=outputs)
        options = self._given.debug_options()
        return ORTModule(model, options, outputs=outputs, memory_budget=self._given.memory_budget)

    def call_model_init(self, trial: Any = None) -> ORTModule:
        """Make a new model with the user's `model_init`, and wrap it."""
        return self._wrapped(super().call_model_init(trial))

    @staticmethod
    def get_optimizer_cls_and_kwargs(args: TrainingArguments, model: Any = None) -> tuple[Any, Any]:
        """Give the optimizer that `args.optim` names, and its arguments."""
        if args.optim == ORTOptimizerNames.ADAMW_ORT_FUSED:
            betas = (args.adam_beta1, args.adam_beta2)
            return FusedAdam, {"lr": args.learning_rate, "betas": betas, "eps": args.adam_epsilon}
        found: tuple[Any, Any] = Trainer.get_optimizer_cls_and_kwargs(args, model)
        return found


def _gives_loss_by_name(model: nn.Module) -> bool:
    base: Any = model
    if hasattr(base, "get_base_model"):  # PEFT's
        base = base.get_base_model()
    return isinstance(base, PreTrainedModel) and bool(getattr(base.config, "return_dict", False))


class ORTSeq2SeqTrainer(ORTTrainer, Seq2SeqTrainer):
    """``transformers.Seq2SeqTrainer``, as :class:`ORTTrainer` is ``Trainer``. PyTorch generates."""

    _arguments = ORTSeq2SeqTrainingArguments
