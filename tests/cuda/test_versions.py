"""Libraries that do not go together, or with the GPU, are refused before anything is computed."""

from __future__ import annotations

import re

import pytest
from cold_gpu import Cold

OPEN = """
try:
    gpu.core.infer("Neg", [("f32", (1,))], provider="gpu")
    print("open")
except NotImplementedError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("variable", "goes", "does_not_go", "sentence"),
    [
        ("EMULATED_DRIVER", "14000", "12080", r"the driver is one for CUDA 12.8, NVRTC one of CUDA 13\.\d+"),
        ("EMULATED_COMPILED", "90", "103", "GPU 0 is of sm_90, for which this NVRTC does not compile"),
        ("EMULATED_CUBLASLT", "120805", "140000", "cuBLASLt is of version 14, what is known here is 12 to 13"),
        ("EMULATED_CUBLASLT", "130002", "110501", "cuBLASLt is of version 11, what is known here is 12 to 13"),
    ],
)
def test_what_does_not_go_together_is_refused_in_a_sentence(
    cold: Cold, variable: str, goes: str, does_not_go: str, sentence: str
) -> None:
    assert cold.run(OPEN, **{variable: goes}) == ("open\n", "", 0)
    ran = cold.run(OPEN, **{variable: does_not_go})
    assert (ran.err, ran.code) == ("", 0)
    assert re.fullmatch(f"not supported: {sentence}\n", ran.out)
