"""The trainers of Hugging Face's transformers with the model in the C core, under the names that Optimum had for them.

Needs transformers and accelerate, which nothing else of this package imports.
"""

from __future__ import annotations

import enum
import warnings
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

try:
    import accelerate  # noqa: F401, without which there are trainers, but none that starts
    from transformers import (
        PreTrainedModel,
        Seq2SeqTrainer,
        Seq2SeqTrainingArguments,
        Trainer,
        TrainingArguments,
    )
    from transformers.trainer_pt_utils import LabelSmoother
    from transformers.training_args import OptimizerNames
except ImportError as error:
    needed = 'ortmodule_c.trainer needs transformers and accelerate (pip install "ortmodule_c[trainer]")'
    raise ImportError(f"{needed}: {error}") from error

from .budget import Budget
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
        Has no effect: a model's own loss and that of smoothed labels are computed in the C core in any case.
    save_onnx, onnx_prefix
        Write the graphs as ONNX files to `output_dir`, under names that begin so.
    onnx_log_level
        Threshold of the logger ``ortmodule_c``, such as ``"INFO"``; by default as it is.
    memory_budget
        As of :class:`ortmodule_c.ORTModule`, a share.

    Raises
    ------
    ValueError
        If `optim` is neither of transformers nor of ours, or `optim_args` are given with ours; if there is no such
        `onnx_log_level` or `memory_budget`.
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
        ours = str(self.optim) if self.optim in {*ORTOptimizerNames} else None
        if ours is not None:
            if self.optim_args:
                raise ValueError(f"optim_args are {self.optim_args!r}, of which optim={ours!r} takes none")
            self.optim = TrainingArguments.optim  # one that transformers knows
        super().__post_init__()
        if ours is not None:
            self.optim = ours
        if self.memory_budget is not None:  # not bytes, also where a file has it as a whole number
            self.memory_budget = float(self.memory_budget)
        Budget.of(self.memory_budget)
        DebugOptions(log_level=self.onnx_log_level)

    def set_optimizer(self, name: str = TrainingArguments.optim, *more: Any, **named: Any) -> ORTTrainingArguments:
        """As of ``TrainingArguments``, with the names of ours too."""
        ours = name in {*ORTOptimizerNames}
        super().set_optimizer(TrainingArguments.optim if ours else name, *more, **named)
        if ours:
            self.optim = str(name)
        return self

    def wrapped(self, module: nn.Module, suffix: str = "") -> ORTModule:
        """The module in the C core; names of its files end so."""
        options = DebugOptions(
            log_level=self.onnx_log_level,
            save_onnx=self.save_onnx,
            onnx_prefix=f"{self.onnx_prefix}{suffix}" if self.onnx_prefix else "",
            save_path=(self.output_dir or "") if self.save_onnx else "",
        )
        return ORTModule(module, options, memory_budget=self.memory_budget)


@dataclass
class ORTSeq2SeqTrainingArguments(ORTTrainingArguments, Seq2SeqTrainingArguments):
    """The arguments of :class:`ORTSeq2SeqTrainer`, as :class:`ORTTrainingArguments` are of :class:`ORTTrainer`."""


class _SmoothedLoss(nn.Module):
    """The loss of a ``LabelSmoother`` as a module."""

    def __init__(self, smoother: LabelSmoother) -> None:
        super().__init__()
        self.smoother: Any = smoother

    def forward(self, logits: Tensor, labels: Tensor, shift_labels: bool, items: Tensor | int | None) -> Tensor:
        loss: Tensor = self.smoother((logits,), labels, shift_labels=shift_labels, num_items_in_batch=items)
        return loss


class _LabelSmoother(LabelSmoother):
    """A ``LabelSmoother`` that computes its loss in the C core."""

    def __init__(self, smoother: LabelSmoother, args: TrainingArguments) -> None:
        super().__init__(smoother.epsilon, smoother.ignore_index)
        self._plain = smoother
        self._loss = _wrapped(_SmoothedLoss(smoother), args, "_loss")

    def __call__(
        self, model_output: Any, labels: Tensor, shift_labels: bool = False, num_items_in_batch: Any = None
    ) -> Tensor:
        self._plain.epsilon, self._plain.ignore_index = self.epsilon, self.ignore_index
        logits = model_output["logits"] if isinstance(model_output, dict) else model_output[0]
        loss: Tensor = self._loss(logits, labels, shift_labels, num_items_in_batch)
        return loss


def _wrapped(module: nn.Module, args: TrainingArguments, suffix: str = "") -> ORTModule:
    return args.wrapped(module, suffix) if isinstance(args, ORTTrainingArguments) else ORTModule(module)


class ORTTrainer(Trainer):
    """``transformers.Trainer`` whose model runs in the C core, as an :class:`ortmodule_c.ORTModule`.

    It takes what that takes, in the same order, a model or `model_init`, and :class:`ORTTrainingArguments` or
    ``TrainingArguments``. Checkpoints are those of the plain model, and either trainer goes on from those of the other
    (dropout draws otherwise here). Where a training step has :meth:`compute_loss` give nothing but the loss of a model
    of transformers, and the wrapper has no hooks, nothing else is computed for it. A model that is an ORTModule is
    taken as it is.

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
        self._given = args
        super().__init__(model if model is None else self._wrapped(model), args, *more, **named)
        if self.label_smoother is not None:
            self.label_smoother: Any = _LabelSmoother(self.label_smoother, args)

    def _wrapped(self, model: nn.Module) -> ORTModule:
        if not isinstance(model, ORTModule):
            return _wrapped(model, self._given)
        asked = [n for n in ("memory_budget", "save_onnx") if getattr(self._given, n, None)]
        if asked:
            warnings.warn(f"the model is an ORTModule, which {' and '.join(asked)} came too late for", stacklevel=4)
        return model

    def call_model_init(self, trial: Any = None) -> ORTModule:
        """Make a new model with the user's `model_init`, and wrap it."""
        return self._wrapped(super().call_model_init(trial))

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, *more: Any, **named: Any
    ) -> Any:
        """As of ``Trainer``; what it does not read of the model's outputs is not computed."""
        wrapper = self.accelerator.unwrap_model(model)
        if return_outputs or not isinstance(wrapper, ORTModule) or not self._reads_loss_alone(model, wrapper, inputs):
            return super().compute_loss(model, inputs, return_outputs, *more, **named)
        with wrapper._ort_giving(("loss",)):
            return super().compute_loss(model, inputs, return_outputs, *more, **named)

    def _reads_loss_alone(self, model: nn.Module, wrapper: ORTModule, inputs: dict[str, Any]) -> bool:
        """Whether ``Trainer.compute_loss`` and nobody else sees the outputs of this call, and takes their loss."""
        return (
            model.training
            and self.label_smoother is None
            and self.compute_loss_func is None
            and Trainer.compute_loss.__module__ == Trainer.__module__
            and not any(m._forward_hooks for m in (model, wrapper))
            and inputs.get("return_dict", True) is True
            and _gives_loss_by_name(wrapper.module)
        )

    @staticmethod
    def get_optimizer_cls_and_kwargs(args: TrainingArguments, model: Any = None) -> tuple[Any, Any]:
        """Give the optimizer that `args.optim` names, and its arguments."""
        if args.optim == ORTOptimizerNames.ADAMW_ORT_FUSED:
            betas = (args.adam_beta1, args.adam_beta2)
            return FusedAdam, {"lr": args.learning_rate, "betas": betas, "eps": args.adam_epsilon}
        args.optim = OptimizerNames(args.optim)  # a search that began with ours gives strings
        found: tuple[Any, Any] = Trainer.get_optimizer_cls_and_kwargs(args, model)
        return found


def _gives_loss_by_name(model: nn.Module) -> bool:
    """Whether it is one of transformers' own, which return what has a field `loss` unless told otherwise."""
    base: Any = model
    if hasattr(base, "get_base_model"):  # PEFT's
        base = base.get_base_model()
    of_transformers = type(base).forward.__module__.startswith("transformers.")
    return isinstance(base, PreTrainedModel) and of_transformers and bool(getattr(base.config, "return_dict", False))


class ORTSeq2SeqTrainer(ORTTrainer, Seq2SeqTrainer):
    """``transformers.Seq2SeqTrainer``, as :class:`ORTTrainer` is ``Trainer``. PyTorch generates."""

    _arguments = ORTSeq2SeqTrainingArguments
