"""Ops that copy what a view of their operand would show: they become what the views do."""

from . import elementwise, shape  # noqa: F401 (the views)
from .registry import TABLE, aten

_VIEWS = (
    *("alias", "diagonal", "expand", "permute", "select", "slice", "split", "split_with_sizes", "squeeze", "t"),
    *("transpose", "unbind", "unfold", "unsqueeze", "view"),
)

for _name in _VIEWS:
    _view, _copy = getattr(aten, _name), getattr(aten, f"{_name}_copy")
    for _overload in _copy.overloads():
        _translation = TABLE.get(getattr(_view, _overload)) if _overload in _view.overloads() else None
        if _translation is not None:
            TABLE[getattr(_copy, _overload)] = _translation
