"""What a user says of a model's inputs and outputs: names, shapes, and which output is the loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

Shape = list[int | str]


class Described(NamedTuple):
    """An input or an output; a name in its shape is that of a size, the same wherever it is named."""

    name: str
    shape: Shape
    is_loss: bool = False


class ModelDescription:
    """A model's inputs and outputs.

    Parameters
    ----------
    given
        ``{"inputs": [(name, shape)], "outputs": [(name, shape)]}``; a tuple of an output may have True as its third
        element, which makes it the loss. Sizes in shapes are numbers, or names of what any number may be.

    Raises
    ------
    TypeError, ValueError
        If it is anything else: the message says where.
    """

    def __init__(self, given: Mapping[str, Any]) -> None:
        if not isinstance(given, Mapping):
            raise TypeError(f"model_desc is a {type(given).__name__}, expected a dict")
        if set(given) != {"inputs", "outputs"}:
            raise ValueError(f"model_desc has {sorted(map(str, given))}, expected 'inputs' and 'outputs'")
        self.inputs = _described(given, "inputs", 2)
        self.outputs = _described(given, "outputs", 3)
        losses = [o.name for o in self.outputs if o.is_loss]
        if len(losses) > 1:
            raise ValueError(f"model_desc has the losses {losses}, expected one at most")
        self.loss = losses[0] if losses else None

    def check(self, kind: str, tensors: Mapping[str, Tensor], sizes: dict[str, tuple[int, str]]) -> None:
        """Raises ValueError for tensors of other shapes than they are described with.

        Parameters
        ----------
        kind
            ``"input"`` or ``"output"``.
        tensors
            By name.
        sizes
            What named sizes are found to be, and where; more are added.
        """
        for name, shape, _ in self.inputs if kind == "input" else self.outputs:
            if name not in tensors:
                continue
            found = list(tensors[name].shape)
            if len(found) != len(shape):
                raise ValueError(f"{kind} {name!r} has shape {found}, model_desc says {shape}")
            for axis, (size, said) in enumerate(zip(found, shape, strict=True)):
                expected, where = sizes.setdefault(said, (size, name)) if isinstance(said, str) else (said, "")
                if size != expected:
                    because = f", and {said!r} is {expected} in {where!r}" if where else ""
                    raise ValueError(
                        f"{kind} {name!r} has shape {found}, model_desc says {shape}: axis {axis} is {size}{because}"
                    )


def _described(given: Mapping[str, Any], kind: str, most: int) -> list[Described]:
    rows = given[kind]
    if not isinstance(rows, Sequence) or isinstance(rows, str) or not rows:
        raise ValueError(f"model_desc[{kind!r}] is {rows!r}, expected a list of tuples")
    found = [_row(f"model_desc[{kind!r}][{i}]", row, most) for i, row in enumerate(rows)]
    names = [row.name for row in found]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise ValueError(f"model_desc[{kind!r}] has {twice[0]!r} twice")
    return found


def _row(where: str, row: Any, most: int) -> Described:
    if not isinstance(row, (tuple, list)) or not 2 <= len(row) <= most:
        raise ValueError(f"{where} is {row!r}, expected a tuple of 2{' or 3' if most == 3 else ''} elements")
    name, shape, *rest = row
    if not isinstance(name, str) or not name:
        raise ValueError(f"{where} has {name!r} for its name, expected a string")
    if not isinstance(shape, (list, tuple)) or not all(_is_size(d) for d in shape):
        raise ValueError(f"{where} has {shape!r} for its shape, expected a list of numbers and names")
    if rest and not isinstance(rest[0], bool):
        raise ValueError(f"{where} has {rest[0]!r} for whether it is the loss, expected True or False")
    return Described(name, list(shape), *rest)


def _is_size(d: Any) -> bool:
    return (isinstance(d, str) and d != "") or (isinstance(d, int) and not isinstance(d, bool) and d >= 0)
