"""A model and its loss as one module."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from .description import ModelDescription

_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class Network(nn.Module):
    """From inputs to outputs, both in the order of a description.

    Parameters
    ----------
    model
        Takes inputs by name. Those that it does not take are labels.
    loss_fn
        Takes what the model returns, its elements one by one if it needs so many arguments, and labels. None: the
        model gives the loss.
    description
        Of inputs and outputs.

    Attributes
    ----------
    n_labels
        How many of the inputs, the last ones, are labels.

    Raises
    ------
    ValueError
        If the model takes no such inputs, or there is a loss without labels or without a name.
    """

    def __init__(self, model: nn.Module, loss_fn: Callable[..., Tensor] | None, description: ModelDescription) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn
        names = [i.name for i in description.inputs]
        self._positional, self._named, labels = _arranged(model, names, loss_fn is not None)
        self.n_labels = len(labels)
        self._outputs = [o.name for o in description.outputs]
        if loss_fn is None:
            return
        if description.loss is None:
            raise ValueError("loss_fn is given, and model_desc says of no output that it is the loss")
        if not labels:
            raise ValueError(f"loss_fn is given, and forward takes all inputs of model_desc: {', '.join(names)}")
        if labels != list(range(len(names) - len(labels), len(names))):
            raise ValueError(f"model_desc has labels before inputs of the model: {', '.join(names)}")
        self._loss = self._outputs.index(description.loss)
        self._takes = _needed_arguments(loss_fn)

    def forward(self, *inputs: Tensor) -> tuple[Tensor | None, ...]:
        """The outputs; None for the loss where labels are left out."""
        positional = [inputs[i] for i in self._positional]
        returned = self.model(*positional, **{name: inputs[i] for name, i in self._named.items()})
        if self.loss_fn is None:
            return tuple(_parts(returned, self._outputs))
        outputs: list[Tensor | None] = list(
            _parts(returned, [*self._outputs[: self._loss], *self._outputs[self._loss + 1 :]])
        )
        labels = inputs[len(self._positional) + len(self._named) :]
        outputs.insert(self._loss, self._loss_of(returned, labels) if labels else None)
        return tuple(outputs)

    def _loss_of(self, returned: Any, labels: Sequence[Tensor]) -> Tensor:
        apart = returned if isinstance(returned, (list, tuple)) else [returned]
        given = apart if self._takes is None or len(apart) + len(labels) == self._takes else [returned]
        assert self.loss_fn is not None
        return self.loss_fn(*given, *labels)


def _arranged(model: nn.Module, names: Sequence[str], has_loss: bool) -> tuple[list[int], dict[str, int], list[int]]:
    """Which inputs the model takes by position and which by name, and the labels."""
    parameters = inspect.signature(model.forward).parameters
    kinds = {p.kind for p in parameters.values()}
    by_name = {p.name: names.index(p.name) for p in parameters.values() if p.kind in _BY_NAME and p.name in names}
    first = [p.name for p in parameters.values() if p.kind is inspect.Parameter.POSITIONAL_ONLY and p.name in names]
    positional = [names.index(name) for name in first]
    rest = [i for i, name in enumerate(names) if name not in by_name and name not in first]
    if kinds & {inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL}:  # the last one is the label
        own, rest = (rest[:-1], rest[-1:]) if has_loss else (rest, [])
        if inspect.Parameter.VAR_KEYWORD in kinds:
            by_name |= {names[i]: i for i in own}
        elif own:
            before = [p.name for p in parameters.values() if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
            positional += [*[by_name.pop(name) for name in before if name in by_name], *own]
    given = {*by_name, *[names[i] for i in positional]}
    kinds_given = (*_BY_NAME, inspect.Parameter.POSITIONAL_ONLY)
    missing = [
        p.name for p in parameters.values() if p.kind in kinds_given and p.default is p.empty and p.name not in given
    ]
    if missing or (rest and not has_loss):
        what = f"lacks {missing[0]!r}" if missing else f"has {names[rest[0]]!r}"
        raise ValueError(f"model_desc {what}, and forward takes {', '.join(parameters)}")
    return positional, by_name, rest


def _needed_arguments(function: Callable[..., Any]) -> int | None:
    """How many a function cannot do without; None: it takes any number, or nothing is known of it."""
    target = function.forward if isinstance(function, nn.Module) else function
    try:
        parameters = inspect.signature(target).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters):
        return None
    return sum(p.kind is not inspect.Parameter.KEYWORD_ONLY and p.default is p.empty for p in parameters)


def _parts(returned: Any, names: Sequence[str]) -> list[Tensor]:
    """What the model has returned, as the outputs of these names."""
    if isinstance(returned, Tensor):
        found = [returned]
    elif isinstance(returned, Mapping):
        there = [name in returned for name in names]
        if any(there) and not all(there):
            lacks = names[there.index(False)]
            raise ValueError(f"the model returned {', '.join(map(str, returned))}, and model_desc has {lacks!r}")
        found = [returned[name] for name in names] if all(there) else list(returned.values())
    elif isinstance(returned, (list, tuple)):
        found = list(returned)
    else:
        raise TypeError(f"the model returned a {type(returned).__name__}, expected tensors")
    if len(found) < len(names):
        raise ValueError(f"the model returned {len(found)} outputs, model_desc says {', '.join(names)}")
    for name, value in zip(names, found, strict=False):
        if not isinstance(value, Tensor):
            raise TypeError(f"output {name!r} is a {type(value).__name__}, not a tensor")
    return found[: len(names)]
