"""Between ONNX files and graphs of the C core, in both directions."""

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from onnx import ModelProto

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


__all__ = ["load"]
