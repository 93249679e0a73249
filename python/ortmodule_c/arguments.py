"""How a call meets the parameters of a forward: names of its arguments, and one form for the ways to write it."""

import inspect
import operator
import types
from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.nn.modules.module import _has_any_global_hook

from .flatten import Spec, first_difference, leaf_paths, numbers_by_path
from .unread import Reads, reads

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_BY_KEYWORD = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class Arguments:
    """The arguments that a module is called with.

    Parameters
    ----------
    module
        The module whose forward is called; it may get another one at any time.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._looked_at: Sequence[Any] = ()  # what the rest follows from
        self._names: list[str] = []
        self._movable: list[str | None] = []
        self._keywords: list[str] = []
        self._rest = "args"
        self._more = self._others = ""  # the parameters that take what is left over
        self._reads: Reads | None = None

    def normal(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The same call, whichever of its arguments are given by keyword, without what the forward does not read.

        A forward that a decorator wraps gets what was written, since the decorator may look for keywords, and so does a
        module that is called otherwise.
        """
        self._look()
        if self._is_called_otherwise():
            return args, kwargs
        if self._reads is not None and not self._is_hooked():
            args, kwargs = self._read_of(self._reads, args, kwargs)
        if not kwargs:
            return args, kwargs
        moved: list[Any] = []
        for name in self._movable[len(args) :]:
            if name not in kwargs:
                break
            moved.append(name)
        if moved:
            args = (*args, *[kwargs[n] for n in moved])
        elif len(kwargs) == 1:
            return args, kwargs
        # What `**kwargs` takes keeps its order, which the forward may walk in.
        named = [n for n in self._keywords if n in kwargs and n not in moved]
        return args, {n: kwargs[n] for n in dict.fromkeys((*named, *kwargs)) if n not in moved}

    def _read_of(
        self, reads: Reads, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        n = len(self._names)
        left_over = () if self._more in reads.unread else args[n:]
        args = (*[reads.of(name, value) for name, value in zip(self._names, args, strict=False)], *left_over)
        drops = self._others in reads.unread
        named = {k: reads.of(k, v) if k in self._keywords else v for k, v in kwargs.items()}
        return args, {k: v for k, v in named.items() if k in self._keywords or not drops}

    def _is_hooked(self) -> bool:
        """Whether others than the forward may see its arguments."""
        module = self._module
        return bool(module._forward_hooks or module._forward_pre_hooks or _has_any_global_hook())

    def _is_called_otherwise(self) -> bool:
        """Whether the module's class has a call of its own, which may look for keywords too."""
        cls = type(self._module)
        return cls.__call__ is not nn.Module.__call__ or cls._call_impl is not nn.Module._call_impl

    def paths(self, spec: Spec) -> list[str]:
        """Where each tensor of a described call lies, such as ``input_ids`` or ``batch['x']``."""
        return [path for name, child in self._named(spec) for path in leaf_paths(child, name)]

    def numbers(self, spec: Spec) -> list[str]:
        """Where each number of a described call lies."""
        return [f"argument {path}" for name, child in self._named(spec) for path, _ in numbers_by_path(child, name)]

    def difference(self, a: Spec, b: Spec) -> str | None:
        """Where two described calls first differ; None if it is in which arguments are given at all."""
        was, now = self._named(a), self._named(b)
        if [n for n, _ in was] != [n for n, _ in now]:
            return None
        found = (first_difference(x, y, name) for (name, x), (_, y) in zip(was, now, strict=True))
        return next((path for path in found if path is not None), None)

    def _named(self, spec: Spec) -> list[tuple[str, Spec]]:
        """The arguments of a described call."""
        self._look()
        positional, keywords = spec[-1]
        n = len(self._names)
        names = [self._names[i] if i < n else f"{self._rest}[{i - n}]" for i in range(len(positional[-1]))]
        return [*zip(names, positional[-1], strict=True), *zip(keywords[-2], keywords[-1], strict=True)]

    def _look(self) -> None:
        """Read the signature of the forward and its code, once."""
        forward = self._module.forward
        sources = sources_of(forward)
        if are_same(sources, self._looked_at):
            return
        function = sources[0]
        try:
            parameters = list(inspect.signature(forward).parameters.values())
        except (TypeError, ValueError):
            parameters = []
        positional = [p for p in parameters if p.kind in _POSITIONAL]
        plain = isinstance(function, types.FunctionType) and not hasattr(function, "__wrapped__")
        self._names = [p.name for p in positional]
        self._movable = [p.name if p.kind is p.POSITIONAL_OR_KEYWORD else None for p in positional] if plain else []
        self._keywords = [p.name for p in parameters if p.kind in _BY_KEYWORD] if plain else []
        self._more = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), "")
        self._rest = self._more or "args"
        self._others = next((p.name for p in parameters if p.kind is p.VAR_KEYWORD), "")
        self._reads = reads(function.__code__) if plain and function is not forward else None
        self._looked_at = sources


def sources_of(forward: Any) -> tuple[Any, ...]:
    """The function of a forward, and what its signature and its code follow from.

    A function stays the same object while its parts are exchanged, as by a reload of its module in a notebook.
    """
    function = getattr(forward, "__func__", forward)
    found: tuple[Any, ...] = ()
    while isinstance(function, types.FunctionType) and function not in found:
        found += (function, function.__code__, function.__defaults__, function.__kwdefaults__)
        if not function.__dict__:
            return found
        found += (function.__dict__.get("__signature__"),)
        function = function.__dict__.get("__wrapped__")
    return (*found, function)


def are_same(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Whether these are the same objects: default values may have an equality of their own."""
    return len(a) == len(b) and all(map(operator.is_, a, b))
