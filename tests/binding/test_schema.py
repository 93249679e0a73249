"""The schema of attributes, csrc/ops.def, as Python sees it."""

from __future__ import annotations

import onnx
import pytest
from onnx import defs

from ortmodule_c import _C
from ortmodule_c.lowering.draft import OPSET

STANDARD = sorted(op for op, (_, standard, _) in _C.ops().items() if standard)


@pytest.mark.parametrize("op", STANDARD)
def test_an_op_of_onnx_has_the_defaults_of_onnx(op: str) -> None:
    ours = _C.attributes(op)
    for name, theirs in defs.get_schema(op, OPSET).attributes.items():
        if name not in ours:
            continue
        kind, otherwise, required = ours[name]
        assert kind == theirs.type.name.lower() or (op, name) == ("ConstantOfShape", "value")
        assert required == theirs.required
        if theirs.default_value.type:
            value = onnx.helper.get_attribute_value(theirs.default_value)
            assert otherwise == pytest.approx(value.decode() if isinstance(value, bytes) else value)


def test_attributes_of_an_op() -> None:
    assert _C.attributes("Relu") == {}
    assert _C.attributes("Elu") == {name: ("float", 1.0, False) for name in ("alpha", "scale", "input_scale")}
    assert _C.attributes("Gelu") == {"approximate": ("string", "none", False)}
    assert _C.attributes("Cast") == {"to": ("int", None, True)}
    assert _C.attributes("Transpose") == {"perm": ("ints", None, False)}
    assert _C.attributes("Conv")["pads"] == ("ints", 0, False)
    with pytest.raises(ValueError, match="no op is named 'Nonsense'"):
        _C.attributes("Nonsense")


@pytest.mark.parametrize("op", sorted(_C.ops()))
def test_an_op_and_its_gradient_read_the_same(op: str) -> None:
    """A gradient takes over the attributes of its node, but for the dtype that the node rounds its result to."""
    for gradient in (f"{op}Grad", f"{op}GradInput", f"{op}GradWeight"):
        if gradient in _C.ops():
            both = _C.attributes(gradient)
            taken = {name: value for name, value in _C.attributes(op).items() if name != "to"}
            assert {**both, **taken} == both and both.keys() - taken.keys() <= {"shape", "types"}
