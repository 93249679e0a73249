"""Files of ``ortmodule_c.artifacts``, trained by programs in C, beside PyTorch."""

import copy
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from ortmodule_c import NotExportable, ORTModule, artifacts
from ortmodule_c.optim import FusedAdam, FusedLamb, FusedSGD

ROOT = Path(__file__).parents[2]
WARNINGS = ["-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Wshadow", "-Werror"]
Make = Callable[[Iterator[nn.Parameter]], Any]


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the programs, linked to an installed library."""
    prefix = tmp_path_factory.mktemp("library")
    build = [sys.executable, "setup.py", "-q", "library", f"--prefix={prefix}"]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    place = [f"-I{prefix}/include/ortmodule_c", f"-L{prefix}/lib", f"-Wl,-rpath,{prefix}/lib", "-lortmodule_c"]
    for source in ("examples/train.c", "tests/library/run.c"):
        out = str(prefix / Path(source).stem)
        compile_ = [os.environ.get("CC", "gcc"), "-std=c11", *WARNINGS, str(ROOT / source), *place, "-o", out]
        subprocess.run(compile_, check=True)
    return prefix


class Classifier(nn.Module):
    """Convolution, statistics that are updated, and a loss beside what it is of."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 6, 3, bias=False), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 9, 5)
        )

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        logits = self.body(x)
        return logits if y is None else {"loss": F.cross_entropy(logits, y), "logits": logits}


class Language(nn.Module):
    """Attention, an embedding that is the head too, and a buffer that is no state."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 11)
        self.head.weight = self.words.weight
        self.register_buffer("scale", torch.tensor(0.5), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        logits = self.head(self.layer(self.words(ids), mask, is_causal=True)) * self.scale
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def images() -> dict[str, Tensor]:
    return {"x": torch.randn(14, 1, 5, 5), "y": torch.randint(5, (14,))}


def words() -> dict[str, Tensor]:
    return {"ids": torch.randint(11, (14, 7))}


def train(program: Path, model: Path, data: Path, *more: object) -> list[float]:
    """The mean losses of the epochs."""
    command = [str(program / "train"), str(model), str(data), *map(str, more)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [float(line.split()[1]) for line in done.stdout.splitlines()]


def epochs(model: nn.Module, optimizer: Any, data: dict[str, Tensor], batch: int, n: int) -> list[float]:
    """As the program in C."""
    means = []
    for _ in range(n):
        losses = []
        for at in range(0, 14, batch):
            out = model(*[t[at : at + batch] for t in data.values()])
            loss = out["loss"] if isinstance(out, dict) else out
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        means.append(sum(losses) / len(losses))
    return means


OPTIMIZERS: dict[str, tuple[Make, Make]] = {
    "sgd": (lambda p: FusedSGD(p, lr=0.1), lambda p: torch.optim.SGD(p, lr=0.1)),
    "momentum": (
        lambda p: FusedSGD(p, lr=0.05, momentum=0.9, weight_decay=0.01, nesterov=True),
        lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01, nesterov=True),
    ),
    # Of what is zero but for rounding Adam makes steps too, unless `eps` is large.
    "adamw": (lambda p: FusedAdam(p, lr=0.01, eps=1e-3), lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-3)),
    "amsgrad": (
        lambda p: FusedAdam(p, lr=0.01, eps=1e-3, amsgrad=True),
        lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-3, amsgrad=True),
    ),
    "lamb": (lambda p: FusedLamb(p, lr=0.01, eps=1e-3), lambda p: FusedLamb(p, lr=0.01, eps=1e-3)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(("kind", "data"), [(Classifier, images), (Language, words)])
def test_a_program_trains_as_pytorch_does(
    programs: Path, tmp_path: Path, kind: type[nn.Module], data: Callable[[], dict[str, Tensor]], name: str
) -> None:
    """Batches of another size at the end, states kept from before and from one run of the program to the next."""
    torch.manual_seed(0)
    model, given = kind(), data()
    plain, (make, make_plain) = copy.deepcopy(model), OPTIMIZERS[name]
    optimizer, theirs = make(model.parameters()), make_plain(plain.parameters())
    wrapped = ORTModule(model)
    assert epochs(wrapped, optimizer, given, 4, 1) == pytest.approx(epochs(plain, theirs, given, 4, 1), rel=1e-4)

    file, samples = tmp_path / "model.safetensors", tmp_path / "data.safetensors"
    example = tuple(t[:4] for t in given.values())
    artifacts.save(file, wrapped, example, optimizer=optimizer, dynamic_axes={name: [0] for name in given})
    save_file(given, samples)
    found = train(programs, file, samples, 4, 2) + train(programs, file, samples, 5, 1)
    wanted = epochs(plain, theirs, given, 4, 2) + epochs(plain, theirs, given, 5, 1)
    assert found == pytest.approx(wanted, rel=1e-4)
    state = artifacts.load_state_dict(file)
    assert state.keys() == plain.state_dict().keys()
    model.load_state_dict(state)
    for key, t in plain.state_dict().items():
        torch.testing.assert_close(state[key], t, rtol=1e-3, atol=1e-4, msg=key)

    again = make(model.parameters())
    artifacts.load_optimizer(file, wrapped, again)
    assert epochs(wrapped, again, given, 4, 2) == pytest.approx(epochs(plain, theirs, given, 4, 2), rel=1e-3)


def test_a_file_is_replaced_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who reads it meanwhile, perhaps by a map of its memory, has the one that was there."""
    model, file, example = Summed(nn.Linear(3, 1)), tmp_path / "model.safetensors", (torch.ones(2, 3),)
    artifacts.save(file, model, example)
    before = file.read_bytes()

    def broken(_tensors: Any, path: Any, _texts: Any) -> None:
        Path(path).write_bytes(before[:100])
        raise OSError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(artifacts, "save_file", broken)
        with pytest.raises(OSError, match="the disk is full"):
            artifacts.save(file, model, example)
    assert file.read_bytes() == before and [*tmp_path.iterdir()] == [file]
    with torch.no_grad():
        model.model.weight.zero_()
    with file.open("rb") as reader:
        artifacts.save(file, model, example)
        assert reader.read() == before
    assert not artifacts.load_state_dict(file)["model.weight"].any() and [*tmp_path.iterdir()] == [file]


def test_a_state_of_another_optimizer_or_model_is_refused(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, other = nn.Linear(3, 2), nn.Sequential(nn.Linear(3, 2))
    losing = Summed(model)
    file = tmp_path / "model.safetensors"
    optimizer = FusedAdam(losing.parameters())
    losing(torch.ones(2, 3)).backward()
    optimizer.step()
    artifacts.save(file, losing, (torch.ones(2, 3),), optimizer=optimizer)
    fresh = FusedAdam(losing.parameters())
    with pytest.raises(ValueError, match="is of the optimizer adam, this one is sgd"):
        artifacts.load_optimizer(file, losing, FusedSGD(losing.parameters()))
    with pytest.raises(ValueError, match=r"has no parameter 0\.weight that is trained"):
        artifacts.load_optimizer(file, other, FusedAdam(other.parameters()))
    with pytest.raises(ValueError, match="has no parameter of shape"):
        artifacts.load_optimizer(file, losing, FusedAdam(other.parameters()))
    with pytest.raises(TypeError, match="optimizer is a Adam, expected one of"):
        artifacts.load_optimizer(file, losing, torch.optim.Adam(losing.parameters()))
    assert not fresh.state
    artifacts.load_optimizer(file, losing, fresh)
    for p in losing.parameters():
        for kind, t in optimizer.state[p].items():
            torch.testing.assert_close(fresh.state[p][kind], t, rtol=0, atol=0)


class Summed(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x).square().sum()


def run(program: Path, model: Path, inputs: dict[str, Tensor], folder: Path, *seed: int) -> dict[str, Tensor]:
    save_file(inputs, folder / "in.safetensors")
    command = [str(program / "run"), str(model), str(folder / "in.safetensors"), str(folder / "out.safetensors")]
    subprocess.run([*command, *map(str, seed)], check=True)
    return load_file(folder / "out.safetensors")


def test_evaluation_has_arguments_and_outputs_of_its_own(programs: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, given, file = Classifier(), images(), tmp_path / "model.safetensors"
    artifacts.save(
        file, model, given, evaluation_example={"x": given["x"]}, dynamic_axes={"x": [0], "y": [0]}, precision="fp32"
    )
    assert model.training
    x = torch.randn(3, 1, 5, 5)
    found = run(programs, file, {"x": x}, tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(found, {"output": model.eval()(x)})
    trained = run(programs, file, {"x": x, "y": torch.tensor([1, 0, 4])}, tmp_path, 1)
    assert {*trained} == {"loss", "logits"}
    with torch.no_grad():
        torch.testing.assert_close(trained["loss"], model.train()(x, torch.tensor([1, 0, 4]))["loss"])


def test_in_16_bits_it_is_as_under_autocast(programs: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, given, file = Classifier(), images(), tmp_path / "model.safetensors"
    artifacts.save(file, model, given, precision="bf16")
    found = run(programs, file, given, tmp_path, 1)
    wanted = ORTModule(model, precision="bf16")(**given)
    torch.testing.assert_close(found, {k: v.detach() for k, v in wanted.items()}, rtol=0, atol=0)


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(400))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = F.dropout(x * self.weight, 0.25, self.training)
        return y.sum(), y


def test_dropout_draws_from_the_seed(programs: Path, tmp_path: Path) -> None:
    file, given = tmp_path / "model.safetensors", {"x": torch.ones(400)}
    artifacts.save(file, Dropped(), given)
    one, again, other = (run(programs, file, given, tmp_path, seed)["1"] for seed in (1, 1, 2))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    assert 200 < int(one.count_nonzero()) < 400
    assert torch.equal(run(programs, file, given, tmp_path)["1"], given["x"])


def test_a_parameter_of_another_group_has_its_numbers(programs: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, given = Classifier(), images()
    plain = copy.deepcopy(model)

    def groups(m: Classifier) -> list[dict[str, Any]]:
        last = [*m.body[4].parameters()]
        m.body[1].bias.requires_grad_(False)
        rest = [p for p in m.parameters() if p.requires_grad and not any(p is q for q in last)]
        return [{"params": rest, "lr": 0.01}, {"params": last, "lr": 0.2, "weight_decay": 0.1}]

    file, samples = tmp_path / "model.safetensors", tmp_path / "data.safetensors"
    artifacts.save(file, model, given, optimizer=FusedSGD(groups(model)), dynamic_axes={name: [0] for name in given})
    save_file(given, samples)
    found = train(programs, file, samples, 4, 2, 0.5)
    optimizer = torch.optim.SGD(groups(plain))
    for group in optimizer.param_groups:
        group["lr"] /= 2
    assert found == pytest.approx(epochs(plain, optimizer, given, 4, 2), rel=1e-4)


def test_texts_of_a_file_may_end_without_a_newline(programs: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, given = Classifier(), images()
    files, samples = [tmp_path / f"{name}.safetensors" for name in ("whole", "stripped")], tmp_path / "data.safetensors"
    example = tuple(t[:7] for t in given.values())
    artifacts.save(files[0], model, example, optimizer=FusedSGD(model.parameters(), lr=0.1))
    save_file(given, samples)
    with safe_open(files[0], "pt") as whole:
        texts = {key: text.rstrip("\n") for key, text in whole.metadata().items()}
    save_file(load_file(files[0]), files[1], texts)
    assert train(programs, files[1], samples, 7, 2) == train(programs, files[0], samples, 7, 2)


class Asking(nn.Module):
    """Whose forward is another for few rows, and which two arguments have the same number of."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (x * y).sum() if x.shape[0] > 4 else (x + y).sum()


def test_a_size_for_another_graph_is_refused(programs: Path, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    artifacts.save(file, Asking(), (torch.ones(6, 3), torch.ones(6, 3)), dynamic_axes={"x": [0], "y": [0]})

    def said(x: Tensor, y: Tensor) -> str:
        save_file({"x": x, "y": y}, tmp_path / "in.safetensors")
        command = [programs / "run", file, tmp_path / "in.safetensors", tmp_path / "out.safetensors"]
        return subprocess.run(command, check=False, capture_output=True, text=True).stderr

    assert said(torch.ones(5, 3), torch.ones(5, 3)) == ""
    assert load_file(tmp_path / "out.safetensors")["output"] == 15
    assert "the size 0 of the input 'x' of evaluation is 4, expected 5 or more" in said(
        torch.ones(4, 3), torch.ones(4, 3)
    )
    assert "the size 0 of the input 'y' of evaluation is 6, where it was 5" in said(torch.ones(5, 3), torch.ones(6, 3))


class Even(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sum() if x.shape[0] % 2 == 0 else -x.sum()


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sum() / len(x)


class Halving(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.view(-1, 2).prod(1).sum()


class Extra(nn.Module):
    def get_extra_state(self) -> Tensor:
        return torch.ones(2)

    def set_extra_state(self, state: Tensor) -> None: ...


class Uncounted(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        self.last = x.sum()
        return self.last


class Outside(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.cpu().cummax(0)[0].sum()


def test_what_needs_python_is_refused(tmp_path: Path) -> None:
    file, x = tmp_path / "model.safetensors", (torch.ones(3),)
    with pytest.raises(NotExportable, match=r"in training the forward sets .*last"):
        artifacts.save(file, Uncounted(), x)
    with pytest.raises(NotExportable, match=r"in training the C core has no kernel for .*cummax"):
        artifacts.save(file, Outside(), x)
    with pytest.raises(NotExportable, match=r"in training the forward asks of open sizes, or binds them, that Eq\(Mod"):
        artifacts.save(file, Halving(), (torch.ones(6),), dynamic_axes={"x": [0]})
    with pytest.raises(NotExportable, match=r"in training the forward asks of open sizes, or binds them, that Eq\(Mod"):
        artifacts.save(file, Even(), (torch.ones(6),), dynamic_axes={"x": [0]})
    for model, rows in ((Halving(), 1), (Mean(), 6)):  # such a number is known, not open
        with pytest.raises(NotExportable, match="in training the size of 'x' along axis 0 cannot be left open"):
            artifacts.save(file, model, (torch.ones(rows, 2),), dynamic_axes={"x": [0]})
    with pytest.raises(TypeError, match=r"optimizer is a SGD, expected one of ortmodule_c\.optim"):
        artifacts.save(file, Dropped(), x, optimizer=torch.optim.SGD([torch.ones(1)]))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"a parameter of shape \[1\] that the model lacks"):
        artifacts.save(file, Dropped(), x, optimizer=FusedSGD([nn.Parameter(torch.ones(1))]))
    hooked, shared, named = Dropped(), nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), nn.Module()
    hooked.weight.register_hook(lambda g: g)
    shared[1].weight.data = shared[0].weight.data
    named.register_buffer("a\tb", torch.ones(1))
    for model, error, said in (
        (hooked, NotExportable, "weight has hooks of its gradient"),
        (shared, NotExportable, r"1\.weight shares memory with 0\.weight"),
        (Extra(), NotExportable, "_extra_state of its state_dict is neither a parameter nor a buffer"),
        (nn.Linear(3, 3), NotExportable, "the first output is no loss of one float"),
        (named, ValueError, r"'a\\tb' has a line's end or a tab in it"),
    ):
        with pytest.raises(error, match=said):
            artifacts.save(file, model, x)
    half = Dropped().bfloat16()
    with pytest.raises(ValueError, match=r"weight is of torch\.bfloat16, which a program does not update"):
        artifacts.save(file, half, x, optimizer=FusedSGD(half.parameters()))
    with pytest.raises(ValueError, match="dynamic_axes has 'z', expected one of 'x'"):
        artifacts.save(file, Dropped(), (torch.ones(400),), dynamic_axes={"z": [0]})
    with pytest.raises(ValueError, match="dynamic_axes has axis 1 of 'x', which has 1 dims"):
        artifacts.save(file, Dropped(), (torch.ones(400),), dynamic_axes={"x": [1]})
    assert not file.exists()
    save_file({"w": torch.ones(1)}, file)
    with pytest.raises(ValueError, match=r"was not written by ortmodule_c\.artifacts"):
        artifacts.load_state_dict(file)
