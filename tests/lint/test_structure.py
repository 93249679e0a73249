"""The rules of the house: who may include whom, what leaves the library, how long a file may be."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from ortmodule_c import _C

pytestmark = pytest.mark.whole
ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"
CUDA = ROOT / "cuda"

PROVIDERS = re.findall(r"^OMC_PROVIDER\((\w+)\)", (CSRC / "providers.def").read_text(), re.M)

# Layer -> layers it may include besides itself. Data (ops.def) may be included from anywhere, and what a device offers
# from anywhere above ops. A device's machinery knows no op; its ops, on top of it, and its table of functions do.
MAY_INCLUDE = {
    "base": set(),
    "graph": {"base"},
    "ops": {"base", "graph"},
    "optim": {"base"},
    **{provider: {"base", "graph", "optim"} for provider in PROVIDERS},
    **{f"{provider}/ops": {"base", "graph", "ops", "optim", provider} for provider in PROVIDERS},
    "autodiff": {"base", "graph", "ops"},
    "plan": {"base", "graph", "ops"},
    "passes": {"base", "graph", "ops", "plan"},
    "run": {"base", "graph", "ops", "autodiff", "passes", "plan"},
    "train": {"base", "graph", "optim", "plan", "run"},
    "python": {"base", "graph", "ops", "optim", "autodiff", "passes", "plan", "run"},
}
SOURCES = sorted(p for kind in ("c", "h", "def") for root in (CSRC, CUDA) for p in root.rglob(f"*.{kind}"))
HEADERS = [p for p in SOURCES if p.suffix == ".h"]


def inside(path: Path) -> Path:
    """As others include it."""
    return path.relative_to(CSRC if CSRC in path.parents else ROOT)


def includes(path: Path) -> list[str]:
    return re.findall(r'^#include "([^"]+)"', path.read_text(), re.M)


def layer_of(path: Path) -> str:
    """Of an included name; what ties a provider's ops to the rest of it belongs to these."""
    top = path.parts[0]
    of_ops = top in PROVIDERS and (path.parts[1] == "ops" or path.name == f"provider_{top}.c")
    return f"{top}/ops" if of_ops else top


@pytest.mark.parametrize("path", [p for p in SOURCES if p.parent != CSRC], ids=lambda p: str(inside(p)))
def test_includes_point_one_way(path: Path) -> None:
    layer = layer_of(inside(path))
    for name in includes(path):
        target = layer_of(Path(name))
        if name == "provider.h":
            assert layer not in ("base", "graph", "ops", "optim"), f"{layer} knows nothing of devices"
        elif "/" in name:
            assert target == layer or target in MAY_INCLUDE[layer], f"{layer} may not include {name}"


def macros(path: Path) -> list[tuple[str, list[str], str]]:
    """Name, parameters and body of each."""
    text = path.read_text().replace("\\\n", " ")
    found = re.findall(r"^\s*#\s*define (\w+)(?:\(([^)]*)\))?(.*)$", text, re.M)
    return [(name, [p.strip() for p in parameters.split(",")], body) for name, parameters, body in found]


@pytest.mark.parametrize("path", HEADERS, ids=lambda p: str(inside(p)))
def test_macros_of_headers_have_names_that_nobody_else_has(path: Path) -> None:
    rows = r"(UNARY|BINARY|TERNARY)(_NO_GRAD|_OPTIONAL)?(_WITH)?|AT_ONCE"
    cudas = r"__\w+__|\w+(Idx|Dim)" if path.name == "hip.h" else "NAN"
    names = {name for name, _, _ in macros(path)} - {"PY_SSIZE_T_CLEAN", *("NAN", "INFINITY", "INT32_MIN", "INT64_MIN")}
    assert not [name for name in names if not re.fullmatch(rf"OMC_\w+|{rows}|{cudas}", name)]


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(inside(p)))
def test_what_macros_declare_is_named_by_who_uses_them(path: Path) -> None:
    """Or out of reach, behind a name that ends in _."""
    declared = r"(?:\w+_t|int|char|double|float|omc_\w+|vacc_t|vmask)(?: const| \*const)? \**(\w+)(?: =|\[| in )"
    for name, parameters, body in macros(path):
        if body.lstrip().startswith("static "):
            continue  # a function made of names and types
        injected = {n for n in re.findall(declared, body) if not n.endswith("_")} - {*parameters, "const"}
        assert not injected, f"{name} declares {injected}"


@pytest.mark.parametrize("provider", PROVIDERS)
def test_only_its_own_folder_names_a_provider(provider: str) -> None:
    """All else knows it by provider.h, of which providers.def lists who there is."""
    for path in SOURCES:
        if provider in inside(path).parts or path.name == "providers.def":
            continue
        code = re.sub(r"/\*.*?\*/", "", path.read_text(), flags=re.S)
        named = re.findall(rf'omc_{provider}_\w+|OMC_{provider.upper()}_\w+|"{provider}[/"]', code)
        assert not named, f"{inside(path)} names {named}"


def test_only_a_provider_starts_threads_and_knows_instructions() -> None:
    for path in SOURCES:
        if not set(PROVIDERS) & set(inside(path).parts):
            found = re.findall(r"#\s*pragma omp|omp\.h|intrin\.h|pthread_create|__AVX\w*", path.read_text())
            assert not found, f"{inside(path)} has {found}"


@pytest.mark.parametrize("path", [p for p in SOURCES if "python" not in p.parts], ids=lambda p: str(inside(p)))
def test_only_the_binding_knows_python(path: Path) -> None:
    assert not re.search(r"#include [<\"](Python\.h|python/)", path.read_text())


PARTS = ("vec_impl.h", "vec_functions.h")  # of a header


@pytest.mark.parametrize("path", [p for p in HEADERS if p.name not in PARTS], ids=lambda p: str(inside(p)))
def test_header_compiles_alone(path: Path, tmp_path: Path) -> None:
    if {CUDA / "gpu", CUDA / "ops"} & {path.parent} and "Read by the host" not in path.read_text():
        pytest.skip("is device code")
    if path.parent.name == "python" and path.name != "dlpack.h":
        pytest.skip("needs Python.h; compiled with the extension")
    source = tmp_path / "alone.c"
    source.write_text(f'#include "{inside(path)}"\nint unit(void);\nint unit(void) {{ return 0; }}\n')
    variant = ["VARIANT=f32_base", "COMPUTE_VARIANT=f32_base", "STORAGE=OMC_F32", "COMPUTE_F32", "KIND=FLOAT", "VL=4"]
    flags = [*(f"-DOMC_{define}" for define in variant), "-D_GNU_SOURCE", f"-I{CSRC}", f"-I{ROOT}"]
    subprocess.run(["gcc", "-std=c11", "-Wall", "-Wextra", "-Werror", *flags, "-fsyntax-only", source], check=True)


@pytest.mark.parametrize("header", ["provider.h", "train/trainer.h", "train/safetensors.h"])
def test_header_is_also_cxx17(header: str, tmp_path: Path) -> None:
    if shutil.which("g++") is None:
        pytest.skip("no C++ compiler here")
    source = tmp_path / "alone.cc"
    source.write_text(f'#include "{header}"\n')
    subprocess.run(
        ["g++", "-std=c++17", "-Wall", "-Wextra", "-Werror", f"-I{CSRC}", "-fsyntax-only", source], check=True
    )


def test_extension_exports_its_init_alone() -> None:
    out = subprocess.run(["nm", "-D", "--defined-only", _C.__file__], capture_output=True, text=True, check=True).stdout
    names = {line.split()[-1] for line in out.splitlines()} - {"_init", "_fini", "__bss_start", "_edata", "_end"}
    assert names == {"PyInit__C"}


def test_extension_links_neither_torch_nor_cuda() -> None:
    out = subprocess.run(["readelf", "-d", _C.__file__], capture_output=True, text=True, check=True).stdout
    needed = re.findall(r"NEEDED.*\[(.+)\]", out)
    assert {n.split(".")[0] for n in needed} <= {"libm", "libdl", "libpthread", "libgomp", "libc", "ld-linux-x86-64"}


def test_one_openmp_runtime_in_the_process() -> None:
    files = set(re.findall(r"(/\S*lib(?:gomp|omp|iomp5)\S*)", Path("/proc/self/maps").read_text()))
    assert len(files) == 1, files


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(inside(p)))
def test_file_is_not_too_long(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 600


def test_every_op_has_a_test_row() -> None:
    rows = "".join(p.read_text() for p in (ROOT / "tests/ops").glob("cases_*.py"))
    # Run by other tests: TorchCall by the fallback tests, the fused op by those of fusion, dropout by its own.
    elsewhere = {"TorchCall", "FusedElementwise", "Dropout"}
    tested = set(re.findall(r'"([A-Z]\w+)"', rows))
    missing = [op for op in _C.ops() if op not in tested | elsewhere and "Grad" not in op]
    assert not missing


def test_attributes_that_are_read_are_those_of_an_op() -> None:
    """That it is one of the node's own op, builds with assertions see to."""
    of_kind: dict[str, set[str]] = {}
    for op in _C.ops():
        for name, (kind, _, _) in _C.attributes(op).items():
            of_kind.setdefault(kind, set()).add(name)
    kinds = {"int": "int", "float": "float", "string": "string", "ints": "ints", "list": "ints", "to_dtype": "int"}
    for path in SOURCES:
        reads = re.findall(r'omc_node_(\w+)\([^,()]+,\s*"(\w+)"', path.read_text())
        wrong = [(getter, name) for getter, name in reads if getter != "attr" and name not in of_kind[kinds[getter]]]
        assert not wrong, f"{inside(path)} reads {wrong}"


def test_every_rewrite_rule_is_held_to_its_claim() -> None:
    text = (ROOT / "tests/passes/graph_patterns.py").read_text()
    assert set(re.findall(r'^    "(\w+)": ', text, re.M)) == set(_C.rules())


def test_no_op_is_named_outside_its_family() -> None:
    """Only rewrites, and the sweep's accumulation, may name an op."""
    allowed = {"passes", "ops", "base", "autodiff"}
    for path in SOURCES:
        if allowed & set(inside(path).parts):
            continue
        named = re.findall(r"OMC_OP_([A-Z][A-Za-z0-9]+)\b", path.read_text())
        ops = [n for n in named if n in _C.ops()]
        assert not ops, f"{inside(path)} names {ops}"


def test_what_the_demo_leaves_behind_is_ignored() -> None:
    demo = (ROOT / "examples" / "train_gpt2.py").read_text()
    written = re.findall(r'default=Path\("([^"]+)"\)', demo)
    assert written and all(f"/{name}" in (ROOT / ".gitignore").read_text().split() for name in written)


def test_files_of_tests_have_names_of_their_own() -> None:
    names = sorted(p.name for p in (ROOT / "tests").rglob("test_*.py"))
    assert names == sorted(set(names))


def test_files_of_one_name_are_of_one_family() -> None:
    """A family has a file of its name in ops, and another in each provider's ops; all else has a name of its own."""
    others = [p for p in SOURCES if p.suffix != ".def" and layer_of(inside(p)).split("/")[-1] != "ops"]
    names = [p.name for p in others]
    assert sorted(names) == sorted(set(names))
    for provider in PROVIDERS:
        own = {p.stem for p in (CSRC / provider / "ops").glob("*.[ch]")}
        assert not own & {p.stem for p in others}


def test_functions_that_device_code_computes_with_are_named_for_amd_too() -> None:
    called = {name for p in CUDA.rglob("*.h") for name in re.findall(r"OMC_R\((\w+)\)", p.read_text())}
    named = re.findall(r"OMC_HIP_(?:BUILTIN|LIBRARY|OF_ONE)\((\w+)", (CUDA / "gpu" / "hip.h").read_text())
    assert called - {"f"} <= {*named}
