"""What the ORTTrainer of ``ortmodule_c.training`` keeps, and goes on from."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from trained import DESCRIPTION, assert_alike, batch, net

from ortmodule_c.training import ORTTrainer, ORTTrainerOptions, amp, checkpoint, optim

h5py = pytest.importorskip("h5py")

CONFIGS: dict[str, Any] = {
    "sgd": optim.SGDConfig(lr=0.1),
    "adam": optim.AdamConfig(lr=0.01, lambda_coef=0.1),
    "lamb": optim.LambConfig(lr=0.01),
}


def trainer(config: Any, seed: int = 0, model: nn.Module | None = None, options: Any = None) -> ORTTrainer:
    module = net(seed) if model is None else model
    return ORTTrainer(module, DESCRIPTION, config, nn.CrossEntropyLoss(), ORTTrainerOptions(options))


def losses(made: ORTTrainer, first: int, last: int) -> list[float]:
    return [made.train_step(*batch(step))[0].item() for step in range(first, last)]


@pytest.mark.parametrize("name", CONFIGS)
def test_training_goes_on_from_a_checkpoint_to_the_bit(name: str, tmp_path: Path) -> None:
    one, other = trainer(CONFIGS[name]), trainer(CONFIGS[name], seed=1)
    losses(one, 0, 3)
    kept = {"epoch": 3, "names": ["a", "b"], "pair": (1, 2.5), "none": None, "nested": {"flag": True}}
    one.save_checkpoint(tmp_path / "checkpoint.ortcp", kept)
    assert other.load_checkpoint(tmp_path / "checkpoint.ortcp") == kept
    assert losses(one, 3, 6) == losses(other, 3, 6)
    assert other.train_step_info.step == other.train_step_info.optimization_step == 6


def test_moments_may_be_left_out(tmp_path: Path) -> None:
    one, other, fresh = (trainer(optim.AdamConfig(lr=0.01)) for _ in range(3))
    losses(one, 0, 3)
    one.save_checkpoint(tmp_path / "checkpoint", include_optimizer_states=False)
    losses(other, 0, 1)
    moments = other.state_dict()["optimizer"]
    assert other.load_checkpoint(tmp_path / "checkpoint") == {}
    for name, row in other.state_dict()["optimizer"].items():
        np.testing.assert_array_equal(row["Moment_1"], moments[name]["Moment_1"])
    fresh.load_state_dict({**one.state_dict(), "optimizer": {}})
    assert fresh.state_dict()["optimizer"] == {}


def test_a_state_has_the_names_that_onnx_runtime_had() -> None:
    made = trainer(optim.AdamConfig())
    losses(made, 0, 2)
    state = made.state_dict()
    assert set(state["model"]["full_precision"]) == {name for name, _ in net().state_dict().items()}
    row = state["optimizer"]["first.weight"]
    assert set(row) == {"Moment_1", "Moment_2", "Update_Count"} and row["Moment_1"].shape == (13, 7)
    assert row["Update_Count"].tolist() == [3]  # ONNX Runtime counts from 1
    assert state["trainer_options"]["optimizer_name"] == "AdamOptimizer"
    assert state["train_step_info"] == {"optimization_step": 2, "step": 2}
    together = trainer(optim.LambConfig())
    losses(together, 0, 2)
    assert together.state_dict()["optimizer"]["shared_optimizer_state"]["Step"].tolist() == [3]
    plain = made.state_dict(pytorch_format=True)
    net().load_state_dict(plain)


def test_a_state_is_a_copy() -> None:
    made = trainer(optim.AdamConfig(lr=0.1))
    losses(made, 0, 1)
    states = [made.state_dict(), made.state_dict(pytorch_format=True)]
    before = pickle.dumps(states)
    losses(made, 1, 2)
    assert pickle.dumps(states) == before


def test_tied_weights_and_halves_come_back(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(7, 7, bias=False)
            self.b = nn.Linear(7, 7, bias=False)
            self.b.weight = self.a.weight
            self.last = nn.Linear(7, 5, dtype=torch.bfloat16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.b(torch.relu(self.a(x))).bfloat16()).float()

    config = optim.AdamConfig([{"params": ["b.weight"], "lambda_coef": 0.1}], lr=0.01)
    torch.manual_seed(0)
    one = trainer(config, model=Tied())
    other = trainer(config, model=Tied())
    losses(one, 0, 2)
    one.save_checkpoint(tmp_path / "checkpoint")
    other.load_checkpoint(tmp_path / "checkpoint")
    assert losses(one, 2, 4) == losses(other, 2, 4)


def test_a_state_that_does_not_fit_is_refused_and_changes_nothing() -> None:
    made = trainer(optim.AdamConfig(lr=0.01))
    losses(made, 0, 1)
    state, before = made.state_dict(), made.state_dict()
    weights, row = state["model"]["full_precision"], state["optimizer"]["last.bias"]
    bad: list[tuple[Any, type[Exception], str]] = [
        ({}, ValueError, "the state has no model/full_precision"),
        (
            {**state, "trainer_options": {"optimizer_name": "LambOptimizer"}},
            ValueError,
            "of LambOptimizer, the trainer has",
        ),
        (
            with_model(state, {**weights, "last.bias": np.zeros(4)}),
            ValueError,
            r"last.bias has shape \[4\] in the state, \[5\]",
        ),
        (with_model(state, {**weights, "extra": np.zeros(4)}), RuntimeError, r"has \['extra'\] beside"),
        (
            with_model(state, {k: w for k, w in weights.items() if k != "last.bias"}),
            RuntimeError,
            r"lacks \['last.bias'\]",
        ),
        ({**state, "optimizer": {"last.bias": {"Moment_1": np.zeros(5)}}}, ValueError, "last.bias has Moment_1 in the"),
        ({**state, "optimizer": {"first": {}}}, RuntimeError, r"has \['optimizer/first'\] beside"),
        (
            {**state, "optimizer": {"last.bias": row | {"Update_Count": []}}},
            ValueError,
            "expected its moments and steps",
        ),
        ({**state, "train_step_info": {"step": -5}}, ValueError, "the state has train_step_info"),
        ({**state, "train_step_info": {"step": "many"}}, ValueError, "many"),
        (
            with_model(state, {**weights, "last.bias": np.array(list("words"))}),
            ValueError,
            "last.bias has ndarray of <U1",
        ),
    ]
    for given, kind, message in bad:
        with pytest.raises(kind, match=message):
            made.load_state_dict(given)
        assert pickle.dumps(made.state_dict()) == pickle.dumps(before)
    made.load_state_dict(with_model(state, {"last.bias": weights["last.bias"] + 1, "extra": np.zeros(4)}), strict=False)
    np.testing.assert_array_equal(made.state_dict()["model"]["full_precision"]["last.bias"], weights["last.bias"] + 1)


def with_model(state: dict[str, Any], weights: dict[str, Any]) -> dict[str, Any]:
    return {**state, "model": {"full_precision": weights}}


def test_a_checkpoint_is_replaced_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = trainer(optim.AdamConfig())
    made.save_checkpoint(tmp_path / "checkpoint", {"n": 1})
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "_write", broken)
        with pytest.raises(OSError, match="the disk is full"):
            made.save_checkpoint(tmp_path / "checkpoint", {"n": 2})
    assert made.load_checkpoint(tmp_path / "checkpoint") == {"n": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint"]
    made.save_checkpoint(tmp_path / "checkpoint", {"n": 3})
    assert made.load_checkpoint(tmp_path / "checkpoint") == {"n": 3}


def broken(*_: Any) -> None:
    raise OSError("the disk is full")


def test_files_that_are_no_checkpoints_are_refused(tmp_path: Path) -> None:
    made = trainer(optim.AdamConfig())
    with pytest.raises(FileNotFoundError, match="there is no checkpoint"):
        made.load_checkpoint(tmp_path / "nothing")
    (tmp_path / "text").write_text("text")
    with pytest.raises(ValueError, match="is not a checkpoint"):
        made.load_checkpoint(tmp_path / "text")
    with h5py.File(tmp_path / "other", "w") as file:
        file["a"] = 1
    with pytest.raises(ValueError, match="a checkpoint has a, expected model/full_precision"):
        made.load_checkpoint(tmp_path / "other")
    with pytest.raises(ValueError, match="there are no checkpoints"):
        made.load_checkpoint()


class Ran:
    """Runs code where it is unpickled."""

    def __reduce__(self) -> Any:
        return (Path.touch, (Path("ran"),))


def test_a_file_runs_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made = trainer(optim.AdamConfig())
    for value in (Ran(), lambda: None, np.ones(2)):
        with pytest.raises(TypeError, match="user_dict holds what a checkpoint does not keep"):
            made.save_checkpoint("checkpoint", {"a": value})
    assert not list(tmp_path.iterdir())
    made.save_checkpoint("checkpoint", {"a": 1})
    with h5py.File("checkpoint", "a") as file:
        del file["user_dict"]
        file["user_dict"] = pickle.dumps(Ran()).hex()
    before = made.state_dict()
    with pytest.raises(pickle.UnpicklingError):
        made.load_checkpoint("checkpoint")
    made.load_state_dict(checkpoint.aggregate_checkpoints(["checkpoint"], pytorch_format=False))
    assert not Path("ran").exists() and pickle.dumps(made.state_dict()) == pickle.dumps(before)


def test_checkpoints_of_cut_weights_are_put_together(tmp_path: Path) -> None:
    """As ONNX Runtime's processes wrote them: each with a part of a weight and of its moments, flat."""
    whole = np.arange(35, dtype=np.float32).reshape(7, 5)
    paths = []
    for rank, part in enumerate(np.split(whole.ravel(), [13])):
        state = {
            "model": {"full_precision": {"w": part, "b": np.ones(3)}},
            "optimizer": {"w": {"Moment_1": part + 1, "Moment_2": part + 2, "Update_Count": np.array([4])}},
            "trainer_options": {
                "world_rank": rank,
                "world_size": 2,
                "zero_stage": 1,
                "optimizer_name": "AdamOptimizer",
            },
            "partition_info": {"w": {"original_dim": np.array([7, 5])}},
        }
        paths.append(tmp_path / f"rank{rank}")
        checkpoint.save(state, paths[-1])
    weights = checkpoint.aggregate_checkpoints(paths[::-1])
    torch.testing.assert_close(weights["w"], torch.from_numpy(whole))
    state = checkpoint.aggregate_checkpoints(paths, pytorch_format=False)
    np.testing.assert_array_equal(state["optimizer"]["w"]["Moment_2"], whole + 2)
    assert state["optimizer"]["w"]["Update_Count"].tolist() == [4] and "partition_info" not in state
    with pytest.raises(ValueError, match=r"checkpoints of the ranks \[1\], expected those of all 2 processes"):
        checkpoint.aggregate_checkpoints(paths[1:])


def test_names_with_a_slash_come_back(tmp_path: Path) -> None:
    checkpoint.save({"a/b": {"c%2Fd": np.ones(2)}, "text": "words"}, tmp_path / "file")
    found = checkpoint.load(tmp_path / "file")
    assert list(found) == ["a/b", "text"] and list(found["a/b"]) == ["c%2Fd"] and found["text"] == "words"


def test_a_model_goes_on_in_pytorch(tmp_path: Path) -> None:
    made = trainer(optim.AdamConfig(lr=0.1))
    losses(made, 0, 2)
    made.save_checkpoint(tmp_path / "checkpoint")
    plain = net(1)
    plain.load_state_dict(checkpoint.aggregate_checkpoints([tmp_path / "checkpoint"]))
    assert_alike(plain, made._module.module.model, 0.0)


def test_a_file_of_onnx_runtime_is_read(tmp_path: Path) -> None:
    """It lacks what the export did not use, counts steps of LAMB together, and keeps user_dict as a pickle."""
    made = trainer(optim.LambConfig(lr=0.01))
    losses(made, 0, 2)
    state = made.state_dict()
    del state["model"]["full_precision"]["norm.num_batches_tracked"]
    state["model"]["full_precision"]["position_ids"] = np.arange(4)
    for name, row in state["optimizer"].items():
        if name != "shared_optimizer_state":
            del row["Update_Count"]
    del state["train_step_info"]
    state["user_dict"] = pickle.dumps({"epoch": 2, "loss": [0.5]}).hex()
    checkpoint.save(state, tmp_path / "file")
    other = trainer(optim.LambConfig(lr=0.01), seed=1)
    assert other.load_checkpoint(tmp_path / "file") == {"epoch": 2, "loss": [0.5]}
    assert losses(made, 2, 4) == losses(other, 2, 4)


def test_steps_of_parameters_may_differ() -> None:
    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(7, 5), nn.Linear(7, 5)
            self.both = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.a(x) + self.b(x) if self.both else self.a(x)

    config = optim.LambConfig(lr=0.1, lambda_coef=0.1, do_bias_correction=True)
    torch.manual_seed(0)
    one, other = trainer(config, model=Halves()), trainer(config, model=Halves())
    losses(one, 0, 3)
    one._module.module.model.both = other._module.module.model.both = True
    losses(one, 3, 4)
    other.load_state_dict(one.state_dict())
    assert losses(one, 4, 7) == losses(other, 4, 7)


def test_moments_of_halves_keep_their_32_bits(tmp_path: Path) -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(7, 5, dtype=torch.bfloat16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.line(x.bfloat16()).float()

    one, other = (trainer(optim.LambConfig(lr=0.01), model=Wide()) for _ in range(2))
    losses(one, 0, 3)
    one.save_checkpoint(tmp_path / "file")
    other.load_checkpoint(tmp_path / "file")
    assert losses(one, 3, 6) == losses(other, 3, 6)


def test_a_checkpoint_within_an_update_is_of_the_update_before(tmp_path: Path) -> None:
    options = {"batch": {"gradient_accumulation_steps": 2}}
    one, other = (trainer(optim.SGDConfig(lr=0.1), options=options) for _ in range(2))
    for made in (one, other):
        made._module.module.model.norm.momentum = 0.0
    losses(one, 0, 3)
    one.save_checkpoint(tmp_path / "file")
    losses(other, 7, 8)  # half an update, which loading drops
    other.load_checkpoint(tmp_path / "file")
    assert other.train_step_info.step == 2
    one.load_checkpoint(tmp_path / "file")
    assert losses(one, 3, 7) == losses(other, 3, 7)


def test_the_scale_of_the_loss_goes_on(tmp_path: Path) -> None:
    def scaled() -> ORTTrainer:
        scaler = amp.DynamicLossScaler(loss_scale=1024.0, up_scale_window=2)
        return trainer(optim.SGDConfig(), options={"mixed_precision": {"enabled": True, "loss_scaler": scaler}})

    one, other = scaled(), scaled()
    losses(one, 0, 3)
    one.save_checkpoint(tmp_path / "file")
    other.load_checkpoint(tmp_path / "file")
    scalers = [made.options.mixed_precision.loss_scaler for made in (one, other)]
    assert [s.loss_scale for s in scalers] == [2048.0, 2048.0]
    losses(one, 3, 4), losses(other, 3, 4)
    assert [s.loss_scale for s in scalers] == [4096.0, 4096.0]


def test_tensors_of_the_loss_are_apart(tmp_path: Path) -> None:
    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.loss_fn = nn.Linear(7, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.loss_fn(x)

    def made(weight: float) -> ORTTrainer:
        loss = nn.CrossEntropyLoss(weight=torch.full((5,), weight))
        return ORTTrainer(Weighted(), DESCRIPTION, optim.SGDConfig(), loss)

    one, other = made(1.0), made(2.0)
    losses(one, 0, 1)
    assert set(one.state_dict(pytorch_format=True)) == {"loss_fn.weight", "loss_fn.bias"}
    one.save_checkpoint(tmp_path / "file")
    other.load_checkpoint(tmp_path / "file")
    assert other.loss_fn.weight.tolist() == [1.0] * 5
    Weighted().load_state_dict(checkpoint.aggregate_checkpoints([tmp_path / "file"]))


def test_tensors_may_be_kept_in_user_dict(tmp_path: Path) -> None:
    made = trainer(optim.SGDConfig())
    made.save_checkpoint(tmp_path / "file", {"rng": torch.arange(3)})
    assert made.load_checkpoint(tmp_path / "file")["rng"].tolist() == [0, 1, 2]
