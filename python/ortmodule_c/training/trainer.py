"""ORTTrainer: a model with its loss, its optimizer and their options, trained a batch a call."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import onnx
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..onnx.export import Names, export, write
from ..optim import clip_grad_norm_
from ..ortmodule import ORTModule
from ..whole import in_mode
from . import building, checkpoint, states
from .amp import DynamicLossScaler
from .checkpoint import MODEL, OF_LOSS, OPTIMIZER, OPTIONS, PRECISION, PROGRESS, SCALER, USER, State
from .description import ModelDescription
from .info import TrainStepInfo
from .network import Network
from .optim.config import LambConfig, OptimizerConfig
from .options import ORTTrainerOptions

Results = Tensor | list[Tensor]
_COUNTS = ("optimization_step", "step")


class ORTTrainer:
    """Trains a model in the C core, a batch a call, as the class of this name of ``onnxruntime.training`` did.

    The model's own parameters are trained, where they are. docs/orttrainer.md tells what is otherwise than it was.

    Parameters
    ----------
    model
        A module, or a model of ONNX, whose initializers are trained.
    model_desc
        Its inputs and outputs, ``{"inputs": [(name, shape), ...], "outputs": [(name, shape, is_loss), ...]}``. Sizes
        are numbers, or names of what may be another number at each call. Inputs of a module are those that its
        forward takes, by name, then labels; outputs are in the order in which it returns them, the loss of `loss_fn`
        among them. Inputs and outputs of a model of ONNX have its names.
    optim_config
        One of :mod:`ortmodule_c.training.optim`.
    loss_fn
        The loss of what a module returns and labels. None: the module, or the model of ONNX, gives the loss.
    options
        All else.

    Attributes
    ----------
    model_desc, optim_config, loss_fn, options
        As given; ``optim_config.lr`` may be set between steps.
    train_step_info
        How far it is; with its `fetches` a step returns other outputs.

    Raises
    ------
    TypeError, ValueError
        If an argument is of the wrong kind, or does not fit the others.

    Examples
    --------
    >>> model_desc = {"inputs": [("x", ["batch", 784]), ("y", ["batch"])],
    ...               "outputs": [("loss", [], True), ("scores", ["batch", 10])]}
    >>> trainer = ORTTrainer(model, model_desc, optim.AdamConfig(lr=1e-3), nn.CrossEntropyLoss())
    >>> loss, scores = trainer.train_step(x, y)
    """

    def __init__(
        self,
        model: nn.Module | onnx.ModelProto,
        model_desc: Mapping[str, Any],
        optim_config: OptimizerConfig,
        loss_fn: Callable[..., Tensor] | None = None,
        options: ORTTrainerOptions | None = None,
    ) -> None:
        if not isinstance(model, (nn.Module, onnx.ModelProto)):
            raise TypeError(f"model is a {type(model).__name__}, expected torch.nn.Module or onnx.ModelProto")
        if not isinstance(optim_config, OptimizerConfig):
            kind = type(optim_config).__name__
            raise TypeError(f"optim_config is a {kind}, expected AdamConfig, LambConfig or SGDConfig")
        if loss_fn is not None and not callable(loss_fn):
            raise TypeError(f"loss_fn is a {type(loss_fn).__name__}, expected a function")
        if options is not None and not isinstance(options, ORTTrainerOptions):
            raise TypeError(f"options is a {type(options).__name__}, expected ORTTrainerOptions")
        self.model_desc = ModelDescription(model_desc)
        self.optim_config = optim_config
        self.loss_fn = loss_fn
        self.options = options or ORTTrainerOptions()
        self.train_step_info = TrainStepInfo(optim_config)
        building.check(self.options)
        paths = vars(self.options.debug.graph_save_paths)
        self._paths = {name: path for name, path in paths.items() if path}
        self._files = tempfile.TemporaryDirectory() if self._paths else None
        self._n_labels = 0
        self._seen: list[tuple[torch.Size, torch.dtype]] | None = None  # inputs of the last step
        if isinstance(model, nn.Module):
            network = Network(model, loss_fn, self.model_desc)
            self._n_labels = network.n_labels
            files = None if self._files is None else self._files.name
            self._module: nn.Module = building.in_core(network, self.options, files)
        elif loss_fn is not None:
            raise ValueError("loss_fn is given, and a model of ONNX has its loss among its outputs")
        else:
            self._module = building.of_onnx(model, self.model_desc, self.options)
        self._device = building.move(self._module, self.options)
        self._module.train()
        self._parameters, frozen = building.trained(self._module, self.options)
        self._called = (
            DistributedDataParallel(self._module, find_unused_parameters=True)
            if self.options.distributed.world_size > 1
            else self._module
        )
        self._optimizer, self._max_norm = building.optimizer(optim_config, self._parameters, frozen, self.options)
        self._optimizer.zero_grad()
        precision = self.options.mixed_precision
        scales = precision.enabled and precision.dtype == "fp16"
        self._loss_scaler = (precision.loss_scaler or DynamicLossScaler()) if scales else None
        # It divides, and looks for what is not finite; how the scale goes on is the business of the other.
        self._scaler = torch.amp.GradScaler(self._device.type, growth_interval=2**31 - 1, enabled=scales)
        self._scaler.scale(torch.ones((), device=self._device))

    @property
    def _train_step_info(self) -> TrainStepInfo:
        """Under the name by which programs set `fetches` in ONNX Runtime."""
        return self.train_step_info

    # ---- steps ----

    def train_step(self, *args: Any, **kwargs: Any) -> Results:
        """Forward, backward, and at every `gradient_accumulation_steps`-th call an update.

        Parameters
        ----------
        args, kwargs
            The inputs of the description, in its order, as one list or by name.

        Returns
        -------
        The outputs of the description in its order, or those of `fetches`; one alone as it is. They are of the model
        before the update.

        Raises
        ------
        TypeError, ValueError
            If inputs or outputs are not as they are described, or the description has no loss of one number.
        """
        info, every = self.train_step_info, self.options.batch.gradient_accumulation_steps
        if self.model_desc.loss is None:
            raise ValueError("model_desc says of no output that it is the loss")
        inputs, sizes = self._inputs(args, kwargs, 0)
        names = self._fetched()
        info.step += 1
        updates = info.step % every == 0
        with torch.enable_grad(), self._apart(updates):
            try:
                outputs = self._outputs(self._called(*inputs), sizes)
                loss = outputs[self.model_desc.loss]
                if loss.numel() != 1:
                    shape = list(loss.shape)
                    raise ValueError(f"the loss {self.model_desc.loss!r} has shape {shape}, expected one number")
            except BaseException:
                info.step -= 1
                raise
            try:
                results = self._chosen(outputs, names)
                if self._loss_scaler is not None and (info.step - 1) % every == 0:
                    self._scaler.update(self._loss_scaler.loss_scale)
                self._scaler.scale(loss.reshape(()) / every).backward()
                if updates:
                    self._update()
            except BaseException:
                self._start_over()
                raise
        if updates:
            self._save_graphs()
        return results

    def eval_step(self, *args: Any, **kwargs: Any) -> Results:
        """Forward, as in evaluation.

        Parameters
        ----------
        args, kwargs
            As of :meth:`train_step`. Labels may be left out where `fetches` has no loss.

        Returns
        -------
        As of :meth:`train_step`.
        """
        names = self._fetched()
        inputs, sizes = self._inputs(args, kwargs, 0 if self.model_desc.loss in names else self._n_labels)
        with in_mode(self._module, False):
            outputs = self._outputs(self._module(*inputs), sizes)
        return self._chosen(outputs, names)

    def _start_over(self) -> None:
        """Forget what was added up since the last update."""
        every, info = self.options.batch.gradient_accumulation_steps, self.train_step_info
        info.step = (info.step - 1) // every * every
        self._optimizer.zero_grad()

    def _update(self) -> None:
        info, scheduler = self.train_step_info, self.options.lr_scheduler
        found: Any = self.optim_config.lr if scheduler is None else scheduler._step(info)
        for group in self._optimizer.param_groups:
            group["lr"] = float(found[0] if isinstance(found, (list, tuple)) else found)
        if self._max_norm is not None:
            self._scaler.unscale_(self._optimizer)
            clip_grad_norm_(dict.fromkeys(self._parameters.values()), self._max_norm)
        self._scaler.step(self._optimizer)
        self._optimizer.zero_grad()
        if self._loss_scaler is not None:
            before = self._scaler.get_scale()
            self._scaler.update()
            info.all_finite = self._scaler.get_scale() >= before
            self._loss_scaler.update(info)
        info.optimization_step += info.all_finite

    def _inputs(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], n_optional: int) -> tuple[list[Tensor], Any]:
        """The inputs in order, where the model is, and sizes by their names."""
        names = [i.name for i in self.model_desc.inputs]
        if len(args) == 1 and isinstance(args[0], (list, tuple)):
            args = tuple(args[0])
        given = dict(zip(names, args, strict=False))
        strange = [name for name in kwargs if name not in names or name in given]
        if len(args) > len(names) or strange:
            what = f"{strange[0]!r} is given twice or is none of them" if strange else f"{len(args)} are given"
            raise TypeError(f"model_desc has the inputs {', '.join(names)}: {what}")
        given |= kwargs
        missing = [name for name in names[: len(names) - n_optional] if name not in given]
        left_out = [name for name in names if name not in given]
        if missing or (left_out and left_out != names[len(names) - n_optional :]):
            raise TypeError(f"model_desc has the inputs {', '.join(names)}: {(missing or left_out)[0]!r} is not given")
        for name, value in given.items():
            if not isinstance(value, Tensor):
                raise TypeError(f"input {name!r} is a {type(value).__name__}, expected a tensor")
        sizes: dict[str, tuple[int, str]] = {}
        self.model_desc.check("input", given, sizes)
        self._seen = [(given[name].shape, given[name].dtype) for name in names if name in given]
        return [given[name].to(self._device, non_blocking=True) for name in names if name in given], sizes

    def _fetched(self) -> list[str]:
        names = [o.name for o in self.model_desc.outputs]
        unknown = [name for name in self.train_step_info.fetches if name not in names]
        if unknown:
            raise ValueError(f"fetches has {unknown[0]!r}, model_desc has the outputs {', '.join(names)}")
        return self.train_step_info.fetches or names

    def _outputs(self, returned: tuple[Tensor | None, ...], sizes: dict[str, tuple[int, str]]) -> dict[str, Tensor]:
        rows = zip(self.model_desc.outputs, returned, strict=True)
        outputs = {described.name: t for described, t in rows if t is not None}
        self.model_desc.check("output", outputs, sizes)
        return outputs

    def _chosen(self, outputs: Mapping[str, Tensor], names: list[str]) -> Results:
        found = [_kept(outputs[name]) for name in names]
        return found[0] if len(found) == 1 else found

    def _apart(self, updates: bool) -> contextlib.AbstractContextManager[None]:
        """Where gradients of processes are not put together before the update, if that is wanted."""
        later = self.options.distributed.allreduce_post_accumulation and not updates
        if later and isinstance(self._called, DistributedDataParallel):
            return self._called.no_sync()
        return contextlib.nullcontext()

    def _save_graphs(self) -> None:
        files, self._files = self._files, None
        if files is None:
            return
        assert isinstance(self._module, ORTModule)
        with files:
            for name, path in self._paths.items():
                written = building.graph_file(self._module, name)
                if not written.exists():
                    warnings.warn(f"{name} is not written: the model has no such graph as a whole", stacklevel=3)
                else:
                    shutil.copy(written, path)

    # ---- files and state ----

    def save_as_onnx(self, path: str | os.PathLike[str]) -> None:
        """Write the model, with its weights of now, as an ONNX file: from inputs to outputs as in :meth:`eval_step`.

        Labels and the loss of `loss_fn` are not part of it. Sizes that have names in the description stay open.

        Raises
        ------
        NotExportable
            If ONNX has not all of its ops, or a size cannot be left open.
        RuntimeError
            If there was no step yet, whose inputs tell dtypes.
        """
        if isinstance(self._module, building.OnnxNetwork):
            return write(self._module.model.to_model(), path)
        if self._seen is None:
            raise RuntimeError("save_as_onnx comes after a step, whose inputs tell dtypes")
        n = len(self.model_desc.inputs) - self._n_labels
        inputs = [i.name for i in self.model_desc.inputs[:n]]
        outputs = [o.name for o in self.model_desc.outputs if not (o.is_loss and self._n_labels)]
        example, axes = [], {}
        for i, (described, (shape, dtype)) in enumerate(zip(self.model_desc.inputs, self._seen[:n], strict=False)):
            axes[f"inputs[{i}]"] = {a: size for a, size in enumerate(described.shape) if isinstance(size, str)}
            sizes = [max(d, 2) if isinstance(size, str) else d for d, size in zip(shape, described.shape, strict=True)]
            example.append(torch.zeros(sizes, dtype=dtype, device=self._device))
        names = Names(inputs, outputs, building.plain)
        write(export(self._module, tuple(example), axes, names=names), path)

    def _tensors(self) -> dict[str, Tensor]:
        own = {id(t) for t in [*self._module.parameters(), *self._module.buffers()]}
        state = self._module.state_dict(keep_vars=True)
        return {building.plain(name): t for name, t in state.items() if id(t) in own}

    def _own_optimizer(self) -> Any:
        """The one that holds the state of the parameters that this process updates."""
        return getattr(self._optimizer, "optim", self._optimizer)

    def state_dict(self, pytorch_format: bool = False) -> State:
        """What training goes on from.

        Parameters
        ----------
        pytorch_format
            Give the model's tensors by name, and nothing else.

        Returns
        -------
        dict
            Copies, of tensors in that case. Otherwise nested dicts: ``model/full_precision`` has arrays by name,
            ``optimizer`` the moments and steps of each weight that this process updates, ``trainer_options``,
            ``train_step_info`` and ``loss_scaler`` numbers. Gradients that no update has taken are not part of it: it
            is as after the last update, but for buffers.
        """
        if pytorch_format:
            tensors = self._tensors().items()
            return {name: t.detach().clone() for name, t in tensors if not name.startswith(OF_LOSS)}
        parallel, info = self.options.distributed, self.train_step_info
        unfinished = info.step % self.options.batch.gradient_accumulation_steps
        names: dict[Tensor, str] = {p: name for name, p in reversed(self._parameters.items())}
        together = isinstance(self.optim_config, LambConfig)
        return {
            MODEL: {PRECISION: {name: states.array_of(t) for name, t in self._tensors().items()}},
            OPTIMIZER: states.of_optimizer(self._own_optimizer(), names, together),
            OPTIONS: {
                "mixed_precision": self.options.mixed_precision.enabled,
                "zero_stage": parallel.deepspeed_zero_optimization.stage if parallel.world_size > 1 else 0,
                "world_rank": parallel.world_rank,
                "world_size": parallel.world_size,
                "data_parallel_size": parallel.data_parallel_size,
                "horizontal_parallel_size": 1,
                "optimizer_name": self.optim_config.name,
            },
            PROGRESS: {"optimization_step": info.optimization_step, "step": info.step - unfinished},
            **({} if self._loss_scaler is None else {SCALER: self._loss_scaler.state_dict()}),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Go on from what :meth:`state_dict` gave, of this trainer or of one of the same model and optimizer.

        Gradients that no update has taken are dropped.

        Parameters
        ----------
        state_dict
            Of all processes together, where each has a part of the optimizer's state.
        strict
            Whether it must have all tensors of the model, by one of their names, and no others, but for whole numbers.

        Raises
        ------
        RuntimeError
            If it has not, and `strict`.
        ValueError
            If it is no such state, is of another optimizer, or has a tensor of another shape. Nothing has changed then.
        """
        if not isinstance(state_dict, Mapping) or PRECISION not in state_dict.get(MODEL, {}):
            raise ValueError(f"the state has no {MODEL}/{PRECISION}: it is none of a trainer")
        given: State = dict(state_dict)
        kind = given.get(OPTIONS, {}).get("optimizer_name", self.optim_config.name)
        if OPTIMIZER in given and kind != self.optim_config.name:
            raise ValueError(f"the state is of {kind}, the trainer has {self.optim_config.name}")
        tensors, optimizer = self._tensors(), self._own_optimizer()
        missing, unexpected = states.differences(given, tensors, self._parameters)
        if strict and (missing or unexpected):
            raise RuntimeError(f"the state lacks {missing or 'nothing'}, and has {unexpected or 'nothing'} beside")
        weights = states.tensors_of(given[MODEL][PRECISION], tensors)
        moments = states.states_of(given.get(OPTIMIZER, {}), optimizer, self._parameters)
        progress = {name: int(given[PROGRESS][name]) for name in _COUNTS if name in given.get(PROGRESS, {})}
        if any(n < 0 for n in progress.values()):
            raise ValueError(f"the state has {PROGRESS} {progress}")
        if self._loss_scaler is not None:
            self._loss_scaler.load_state_dict(given.get(SCALER, {}))
        with torch.no_grad():
            for t, elements in weights:
                t.copy_(elements)
        if OPTIMIZER in given:
            for group in optimizer.param_groups:
                for p in group["params"]:
                    optimizer.state.pop(p, None)
            optimizer.state.update(moments)
        for name, value in progress.items():
            setattr(self.train_step_info, name, value)
        self._optimizer.zero_grad()

    def save_checkpoint(
        self,
        path: str | os.PathLike[str],
        user_dict: Mapping[str, Any] | None = None,
        include_optimizer_states: bool = True,
    ) -> None:
        """Write the state to a file.

        Where processes share the optimizer's state, ``deepspeed_zero_optimization.stage`` 1, each writes a file of its
        own; otherwise one of them is enough.

        Parameters
        ----------
        path
            An HDF5 file, replaced if it is there.
        user_dict
            What is to be had back from :meth:`load_checkpoint`: dicts, lists, tuples, numbers, strings and tensors.
        include_optimizer_states
            False: the file has no moments.
        """
        state = self.state_dict()
        if not include_optimizer_states:
            del state[OPTIMIZER]
        if user_dict:
            state[USER] = checkpoint.to_text(user_dict)
        checkpoint.save(state, path)

    def load_checkpoint(self, *paths: str | os.PathLike[str], strict: bool = True) -> dict[str, Any]:
        """Go on from files of :meth:`save_checkpoint`, or of ONNX Runtime's trainer.

        Parameters
        ----------
        paths
            One, or where processes share the optimizer's state those of all of them.
        strict
            As of :meth:`load_state_dict`.

        Returns
        -------
        dict
            The `user_dict` that was saved; empty if none was.

        Raises
        ------
        FileNotFoundError, RuntimeError, ValueError
            If a file is none, or as of :meth:`load_state_dict`.
        pickle.UnpicklingError
            If its `user_dict`, one of ONNX Runtime's, holds more than :meth:`save_checkpoint` takes. Nothing has
            changed then; ``load_state_dict(checkpoint.aggregate_checkpoints(paths, pytorch_format=False))`` goes on
            without it.
        """
        state = checkpoint.joined([checkpoint.load(path) for path in paths])
        kept = checkpoint.of_text(state[USER]) if USER in state else {}
        self.load_state_dict(state, strict)
        return kept


def _kept(t: Tensor) -> Tensor:
    """A result that no update changes."""
    is_of_model = (t.requires_grad and t.is_leaf) or t._base is not None
    return t.detach().clone() if is_of_model else t.detach()
