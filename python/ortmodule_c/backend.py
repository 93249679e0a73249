"""The Backend API of ONNX on the C core: ``ortmodule_c.backend.prepare(model).run(inputs)``."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import torch
from onnx import ModelProto, NodeProto
from onnx.backend.base import Backend, BackendRep, Device, DeviceType, namedtupledict
from torch import Tensor

from .dtypes import DTYPES
from .errors import NotExportable
from .onnx import load
from .onnx.module import OnnxModule

_BFLOAT16 = "bfloat16"


class Rep(BackendRep):
    """A model that is ready to run.

    Attributes
    ----------
    module
        It, as a module.
    """

    def __init__(self, module: OnnxModule) -> None:
        self.module = module

    def run(self, inputs: Any, **kwargs: Any) -> tuple[Any, ...]:
        """The outputs, by position and name; inputs are given by position, or by name in a mapping.

        Each is an array, a list of them for a sequence, or None for an optional that is not there.
        """
        by_name = (
            inputs if isinstance(inputs, Mapping) else dict(zip(self.module.input_names, _list(inputs), strict=True))
        )
        with torch.no_grad():
            results = self.module(**{name: _of_each(_tensor, a) for name, a in by_name.items()})
        arrays = [_of_each(_array, t) for t in (results if isinstance(results, tuple) else (results,))]
        return namedtupledict("Outputs", self.module.output_names)(*arrays)


class CpuBackend(Backend):
    """ONNX models on the CPU; what has no kernel is refused, by NotExportable or NotImplementedError."""

    @classmethod
    def prepare(cls, model: ModelProto, device: str = "CPU", **kwargs: Any) -> Rep:
        """A model that is ready to run; NotExportable names a node that cannot."""
        if not cls.supports_device(device):
            raise NotExportable(f"there are no kernels for device {device!r}")
        return Rep(load(model))

    @classmethod
    def run_model(cls, model: ModelProto, inputs: Any, device: str = "CPU", **kwargs: Any) -> tuple[Any, ...]:
        """The outputs of a model."""
        return cls.prepare(model, device).run(inputs)

    @classmethod
    def run_node(
        cls,
        node: NodeProto,
        inputs: Any,
        device: str = "CPU",
        outputs_info: Sequence[tuple[np.dtype, tuple[int, ...]]] | None = None,
        **kwargs: Any,
    ) -> tuple[Any, ...]:
        """The outputs of one node, of the newest opset unless `opset_version` says otherwise."""
        given = [name for name in node.input if name]
        infos = [
            onnx.helper.make_tensor_value_info(name, onnx.helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
            for name, a in zip(given, map(np.asarray, _list(inputs)), strict=True)
        ]
        results = [onnx.helper.make_value_info(name, onnx.TypeProto()) for name in node.output if name]
        version = kwargs.get("opset_version", onnx.defs.onnx_opset_version())
        model = onnx.helper.make_model(
            onnx.helper.make_graph([node], "node", infos, results),
            opset_imports=[onnx.helper.make_opsetid("", version)],
        )
        return cls.run_model(model, inputs, device)

    @classmethod
    def supports_device(cls, device: str) -> bool:
        """Whether it is the CPU."""
        return Device(device).type == DeviceType.CPU if device in DeviceType.__dict__ or ":" in device else False


def _of_each(convert: Callable[[Any], Any], value: Any) -> Any:
    """Of an array or tensor, of each of a list, and nothing of nothing."""
    if isinstance(value, list):
        return [convert(v) for v in value]
    return None if value is None else convert(value)


def _list(inputs: Any) -> Sequence[Any]:
    return inputs if isinstance(inputs, (list, tuple)) else [inputs]


def _tensor(array: Any) -> Tensor:
    given = np.asarray(array)
    if given.dtype.name == _BFLOAT16:
        return torch.from_numpy(given.view(np.int16).copy()).view(torch.bfloat16).reshape(given.shape)
    try:
        tensor = torch.from_numpy(np.array(given, order="C"))
    except TypeError as error:
        raise NotExportable(f"there are no tensors of {given.dtype}") from error
    if tensor.dtype not in DTYPES:
        raise NotExportable(f"dtype {tensor.dtype} is not known to the C core")
    return tensor


def _array(t: Tensor) -> np.ndarray:
    if t.dtype == torch.bfloat16:
        return t.view(torch.int16).numpy().view(onnx.helper.tensor_dtype_to_np_dtype(onnx.TensorProto.BFLOAT16))
    return t.numpy()


prepare = CpuBackend.prepare
run_model = CpuBackend.run_model
run_node = CpuBackend.run_node
supports_device = CpuBackend.supports_device
is_compatible = CpuBackend.is_compatible
