"""No kernel may be lost: a record that is not linked is no error, and tests skip what has none."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import check

# What is refused of all rows of the tables of ops and their gradients, in all dtypes: heads that are too long,
HEADS = {
    f"Attention-{dtype}-1·1·2·{d}": f"cuda has no kernel for heads of {d}"
    for dtype, d in (("f32", 129), ("f64", 65), ("bf16", 257))
}
# and cells of recurrent layers and products of groups, which run in PyTorch on a GPU.
IN_PYTORCH = ("LstmCells", "GruCells", "RnnCells", "GroupedMatMul")
LEFT = {f"{op}-": f"{op}: cuda has no kernel" for op in IN_PYTORCH}


def matches(refused: dict[str, str], known: dict[str, str]) -> set[str]:
    """Rows that are refused as is known."""
    return {
        row
        for row, why in refused.items()
        if any(row.startswith(name) and reason in why for name, reason in known.items())
    }


def test_every_row_has_kernels_forward_and_backward_in_every_dtype(tmp_path: Path) -> None:
    subprocess.run([sys.executable, check.__file__, "--write", str(tmp_path)], check=True)
    refused = json.loads((tmp_path / check.REFUSED).read_text())
    heads, left = matches(refused, HEADS), matches(refused, LEFT)
    assert {row: why for row, why in refused.items() if row not in heads | left} == {}
    assert len(heads) == 2 * len(HEADS) and left
