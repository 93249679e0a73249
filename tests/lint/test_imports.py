"""What `import ortmodule_c` brings along: itself, and nothing that PyTorch has not brought before."""

import subprocess
import sys

SCRIPT = """
import sys, torch
before = set(sys.modules)
import ortmodule_c
print(*sorted({name.split(".")[0] for name in set(sys.modules) - before} - sys.stdlib_module_names))
print(*sorted(name for name in set(sys.modules) - before if name.startswith("torch.")))
model = ortmodule_c.ORTModule(torch.nn.Linear(2, 2))
model.train().state_dict(), model.fallback_report()
print(*[name for name in ("onnx", "onnx_ir", "sympy", "torch._dynamo") if name in sys.modules])
"""


def test_what_makes_graphs_is_imported_with_the_first_graph() -> None:
    out = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True).stdout
    assert out.splitlines() == ["ortmodule_c", "", ""]
