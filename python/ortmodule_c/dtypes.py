"""The dtypes of the C core."""

import torch

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
