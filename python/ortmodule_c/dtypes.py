"""The dtypes of the C core, and those whose tensors it holds as others."""

import torch
from torch import Tensor

# torch dtype -> (name in the text form, name in ONNX).
DTYPES: dict[torch.dtype, tuple[str, str]] = {
    torch.float32: ("f32", "FLOAT"),
    torch.float64: ("f64", "DOUBLE"),
    torch.float16: ("f16", "FLOAT16"),
    torch.bfloat16: ("bf16", "BFLOAT16"),
    torch.int64: ("i64", "INT64"),
    torch.int32: ("i32", "INT32"),
    torch.int16: ("i16", "INT16"),
    torch.int8: ("i8", "INT8"),
    torch.uint8: ("u8", "UINT8"),
    torch.bool: ("bool", "BOOL"),
}
BY_TEXT = {text: dtype for dtype, (text, _) in DTYPES.items()}

# What the core holds other tensors as, to move them and to hand them to PyTorch: complex numbers as pairs along a last
# dim, as ONNX has them; others as what has their size.
CARRIERS: dict[torch.dtype, torch.dtype] = {
    torch.complex64: torch.float32,
    torch.complex128: torch.float64,
    torch.uint16: torch.int16,
    torch.uint32: torch.int32,
    torch.uint64: torch.int64,
    torch.float8_e4m3fn: torch.uint8,
    torch.float8_e4m3fnuz: torch.uint8,
    torch.float8_e5m2: torch.uint8,
    torch.float8_e5m2fnuz: torch.uint8,
    torch.float8_e8m0fnu: torch.uint8,
}


def differentiable(t: Tensor) -> bool:
    """Whether autograd goes through tensors of its dtype."""
    return t.is_floating_point() or t.is_complex()


def held_whole(t: Tensor) -> bool:
    """Whether the core holds a tensor as an integer, through which no gradient goes."""
    return t.dtype in CARRIERS and not t.is_complex()


def holds(t: Tensor) -> bool:
    """Whether the core holds a tensor, as it is or as another."""
    return t.dtype in DTYPES or (t.dtype in CARRIERS and not (t.requires_grad and held_whole(t)))


def encoded(t: Tensor) -> Tensor:
    """A tensor as the core holds it: the same memory, unless a conjugation or sign is pending on it."""
    if t.is_complex():
        return torch.view_as_real(t.resolve_conj().resolve_neg())
    return t.view(CARRIERS[t.dtype]) if t.dtype in CARRIERS else t


def row_major(t: Tensor) -> Tensor:
    """The same with its elements in row-major order, none of which waits for its sign."""
    if t.dtype in CARRIERS:
        return encoded(t.detach()).contiguous()
    return t if t.is_contiguous() and not t.is_neg() else t.resolve_neg().contiguous()


def decoded(t: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor of that dtype which the core holds as `t`, in the same memory."""
    if dtype.is_complex:
        return torch.view_as_complex(t)
    return t.view(dtype)
