"""Between ONNX files and graphs of the C core, in both directions."""

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onnx import ModelProto
    from torch import nn

    from .module import OnnxModule


def load(source: "str | os.PathLike[str] | ModelProto") -> "OnnxModule":
    """A module that computes what an ONNX model does, and can be trained.

    Parameters
    ----------
    source
        A file, external data beside it, or a model.

    Returns
    -------
    OnnxModule
        Its parameters are the floating point initializers that have dims, by their names; running statistics are
        buffers. What the graph itself is made of, such as shapes, indices, bounds and scalars, is neither.

    Raises
    ------
    NotExportable
        If there is a node that has no translation: the message names it, with its domain and version.
    TypeError
        If it is neither.
    """
    import onnx

    from .module import OnnxModule

    if isinstance(source, (str, os.PathLike)):
        source = onnx.load(os.fspath(source))
    if not isinstance(source, onnx.ModelProto):
        raise TypeError(f"source is a {type(source).__name__}, expected a path or an onnx.ModelProto")
    return OnnxModule(source)


def save(
    path: str | os.PathLike[str],
    model: "nn.Module",
    example: tuple[Any, ...] | Mapping[str, Any],
    *,
    dynamic_axes: Mapping[str, Sequence[int] | Mapping[int, str]] | None = None,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    training: bool = False,
) -> None:
    """Write a module, with its weights, as an ONNX file that any runtime can run.

    Parameters
    ----------
    path
        The file. Weights of more than 2 GiB go to another one beside it, ``NAME.data``.
    model
        The module, left as it was. An :class:`ortmodule_c.ORTModule` has said `precision` and `outputs`; one of
        :func:`load` is written as it was read, with the weights of now.
    example
        Arguments that it is called with, or keyword arguments. The graph is made for their dtypes and sizes; what is
        no tensor is part of it.
    dynamic_axes
        By name of an argument the axes whose size may be another one, or names for these sizes by axis, which are the
        same where their names are.
    input_names, output_names
        Of the tensors that are given, and of the results, in their order; by default those of the arguments, and those
        that the module returns them under, such as ``logits``.
    training
        Write what the module computes in training mode; what it would write into its buffers is left out.

    Raises
    ------
    NotExportable
        If there is no graph of the module as a whole, it has an op that ONNX has not, or asks more of an open size.
        The model is run once, as :func:`load` reads it, and once more where a size is 1 and where it is beyond what
        the forward asks of it, and has to give what the module does wherever that gives anything.
    ValueError
        If `dynamic_axes` names what is no tensor of the example, or names are not as many as there are values, or the
        same for two of them.
    """
    from .export import Names, export, write

    write(export(model, example, dynamic_axes or {}, training, Names(input_names, output_names)), path)


__all__ = ["load", "save"]
