"""Steps of the ORTTrainer of ``ortmodule_c.training`` beside a loop of PyTorch's."""

import math
from functools import partial
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import Tensor, nn
from trained import DESCRIPTION, Net, assert_alike, batch, by_hand, copies, net

from ortmodule_c.optim import FusedLamb
from ortmodule_c.training import ORTTrainer, ORTTrainerOptions, TrainStepInfo, amp, optim

SGD = optim.SGDConfig(lr=0.1)


def trainer(
    model: nn.Module, config: Any = None, options: dict[str, Any] | None = None, loss: Any = None
) -> ORTTrainer:
    loss_fn = nn.CrossEntropyLoss() if loss is None else loss
    return ORTTrainer(model, DESCRIPTION, config or optim.SGDConfig(lr=0.1), loss_fn, ORTTrainerOptions(options))


def losses(made: ORTTrainer, steps: int) -> list[float]:
    return [made.train_step(*batch(step))[0].item() for step in range(steps)]


def of_lamb(params: Any) -> FusedLamb:
    return FusedLamb(params, 0.01, use_nvlamb=True, weight_decay=0.1, max_grad_norm=None, ratio_max=0.7)


BEFORE, AFTER = optim.AdamConfig.DecayMode
OPTIMIZERS: dict[str, tuple[Any, Any, float | None]] = {
    "sgd": (SGD, lambda p: torch.optim.SGD(p, 0.1), None),
    "adam": (optim.AdamConfig(lr=0.01), lambda p: torch.optim.Adam(p, 0.01), 1.0),
    "adamw": (
        optim.AdamConfig(lr=0.01, alpha=0.8, beta=0.9, lambda_coef=0.1, epsilon=1e-6, max_norm_clip=0.3),
        lambda p: torch.optim.AdamW(p, 0.01, (0.8, 0.9), 1e-6, 0.1),
        0.3,
    ),
    "lamb": (
        optim.LambConfig(lr=0.01, lambda_coef=0.1, do_bias_correction=True, ratio_max=0.7),
        of_lamb,
        1.0,
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_model_is_trained_as_by_a_loop_of_pytorch(name: str) -> None:
    config, make, clip = OPTIMIZERS[name]
    ours, plain = copies(2)
    found = losses(trainer(ours, config), 8)
    expected = by_hand(plain, make(plain.parameters()), 8, clip=clip)
    assert found == pytest.approx(expected, rel=1e-4)
    assert_alike(ours, plain)


def test_weights_may_decay_after_the_step() -> None:
    (w,) = torch.ones(1, 3, requires_grad=True)
    model = nn.Linear(3, 1, bias=False)
    model.weight.data = w.detach()[None]
    description = {"inputs": [("input", [2, 3])], "outputs": [("loss", [2, 1], True)]}
    config = optim.AdamConfig(lr=0.5, lambda_coef=0.1, epsilon=0.0, weight_decay_mode=AFTER)
    ORTTrainer(Summed(model), {**description, "outputs": [("loss", [], True)]}, config).train_step(torch.ones(2, 3))
    torch.testing.assert_close(model.weight.detach(), torch.full((1, 3), (1 - 0.5) * (1 - 0.5 * 0.1)))


class Summed(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input: Tensor) -> Tensor:
        return self.model(input).sum()


def test_groups_have_numbers_of_their_own() -> None:
    ours, plain = copies(2)
    config = optim.AdamConfig([{"params": ["first.weight", "last.weight"], "lambda_coef": 0.1}], lr=0.01)
    losses(trainer(ours, config, {"utils": {"grad_norm_clip": False}}), 5)
    decayed = [plain.first.weight, plain.last.weight]
    rest = [p for p in plain.parameters() if all(p is not d for d in decayed)]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    by_hand(plain, torch.optim.AdamW(groups, 0.01), 5, clip=None)
    assert_alike(ours, plain)


def test_gradients_are_averaged_over_the_steps_of_an_update() -> None:
    ours, plain = copies(2)
    made = trainer(ours, SGD, {"batch": {"gradient_accumulation_steps": 3}})
    found = losses(made, 7)
    assert found == pytest.approx(by_hand(plain, torch.optim.SGD(plain.parameters(), 0.1), 7, clip=None, accumulate=3))
    assert_alike(ours, plain)
    assert (made.train_step_info.step, made.train_step_info.optimization_step) == (7, 2)


def cosine(step: int) -> float:
    return step / 2 if step < 2 else 0.5 * (1 + math.cos(math.pi * (step - 2) / 8))


SCHEDULES: dict[str, tuple[Any, Any]] = {
    "constant": (optim.lr_scheduler.ConstantWarmupLRScheduler(10, 0.2), lambda i: min(i / 2, 1)),
    "cosine": (optim.lr_scheduler.CosineWarmupLRScheduler(10, 0.5, 0.2), cosine),
    "linear": (optim.lr_scheduler.LinearWarmupLRScheduler(10, 0.2), lambda i: i / 2 if i < 2 else (10 - i) / 8),
    "poly": (
        optim.lr_scheduler.PolyWarmupLRScheduler(10, lr_end=0.01, power=2.0, warmup=0.2),
        lambda i: i / 2 if i < 2 else (0.01 + 0.09 * (1 - (i - 2) / 8) ** 2) / 0.1,
    ),
    "after the end": (optim.lr_scheduler.LinearWarmupLRScheduler(3, 0.0), lambda i: max(0, (3 - i) / 3)),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_sets_the_learning_rate_of_an_update(name: str) -> None:
    schedule, factor = SCHEDULES[name]
    ours, plain = copies(2)
    made = trainer(ours, SGD, {"lr_scheduler": schedule})
    losses(made, 7)
    by_hand(plain, torch.optim.SGD(plain.parameters(), 0.1), 7, clip=None, lr=lambda i: 0.1 * factor(i))
    assert_alike(ours, plain)
    assert schedule.get_last_lr() == pytest.approx([0.1 * factor(6)])


def test_a_schedule_may_be_a_users_own() -> None:
    class Halved(optim.lr_scheduler._LRScheduler):
        def get_lr(self, train_step_info: TrainStepInfo) -> list[float]:
            return [train_step_info.optimizer_config.lr * 0.5**train_step_info.optimization_step]

    ours, plain = copies(2)
    losses(trainer(ours, SGD, {"lr_scheduler": Halved()}), 4)
    by_hand(plain, torch.optim.SGD(plain.parameters(), 0.1), 4, clip=None, lr=lambda i: 0.1 * 0.5**i)
    assert_alike(ours, plain)


def test_the_learning_rate_may_be_set_between_steps() -> None:
    ours, plain = copies(2)
    made = trainer(ours, optim.SGDConfig(lr=0.1))
    for step, lr in enumerate((0.1, 0.01)):
        made.optim_config.lr = lr
        made.train_step(*batch(step))
    by_hand(plain, torch.optim.SGD(plain.parameters()), 2, clip=None, lr=lambda i: (0.1, 0.01)[i])
    assert_alike(ours, plain)


def test_evaluation_changes_nothing() -> None:
    ours, plain = copies(2)
    made, x, y = trainer(ours), *batch(0)
    loss, scores = made.eval_step(x, y)
    plain.eval()
    torch.testing.assert_close(scores, plain(x))
    torch.testing.assert_close(loss, nn.functional.cross_entropy(plain(x), y))
    assert_alike(ours, plain, 0.0)
    assert ours.training and ours.norm.training and not scores.requires_grad


def test_a_submodule_put_in_evaluation_stays_there() -> None:
    ours = net()
    made = trainer(ours)
    ours.norm.eval()
    made.eval_step(*batch(0))
    made.train_step(*batch(0))
    assert ours.training and not ours.norm.training and ours.norm.num_batches_tracked == 0


def test_what_is_fetched_is_what_is_returned() -> None:
    made = trainer(net())
    x, y = batch(0)
    made.train_step_info.fetches = ["scores", "loss"]
    scores, loss = made.train_step(x, y)
    assert scores.shape == (6, 5) and loss.shape == ()
    made.train_step_info.fetches = ["scores"]
    assert made.eval_step(x).shape == (6, 5)  # without labels
    assert made.eval_step(x, y).shape == (6, 5)
    made.train_step_info.fetches = ["logits"]
    with pytest.raises(ValueError, match="fetches has 'logits', model_desc has the outputs loss, scores"):
        made.train_step(x, y)


def test_inputs_are_given_in_order_by_name_or_as_a_list() -> None:
    x, y = batch(0)
    calls: list[Any] = [((x, y), {}), (([x, y],), {}), ((x,), {"y": y}), ((), {"y": y, "x": x})]
    found = [trainer(net()).train_step(*args, **kwargs)[0].item() for args, kwargs in calls]
    assert len(set(found)) == 1


BAD_CALLS: dict[str, tuple[Any, Any, type[Exception], str]] = {
    "too few": (lambda x, y: (x,), {}, TypeError, "inputs x, y: 'y' is not given"),
    "too many": (lambda x, y: (x, y, y), {}, TypeError, "inputs x, y: 3 are given"),
    "an unknown name": (lambda x, y: (x, y), {"z": 1}, TypeError, "'z' is given twice or is none of them"),
    "no tensor": (lambda x, y: (x, 3), {}, TypeError, "input 'y' is a int, expected a tensor"),
    "another size": (
        lambda x, y: (x[:, :6], y),
        {},
        ValueError,
        r"'x' has shape \[6, 6\], model_desc says .*axis 1 is 6",
    ),
    "other dims": (lambda x, y: (x[0], y), {}, ValueError, r"input 'x' has shape \[7\], model_desc says"),
    "sizes that differ": (lambda x, y: (x, y[:5]), {}, ValueError, "axis 0 is 5, and 'batch' is 6 in 'x'"),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_a_call_that_is_not_as_described_is_refused_and_changes_nothing(name: str) -> None:
    args, kwargs, kind, message = BAD_CALLS[name]
    ours, plain = copies(2)
    made = trainer(ours)
    with pytest.raises(kind, match=message):
        made.train_step(*args(*batch(0)), **kwargs)
    assert_alike(ours, plain, 0.0)
    assert made.train_step_info.step == 0
    losses(made, 1)


def test_an_output_that_is_not_as_described_is_refused() -> None:
    description = {**DESCRIPTION, "outputs": [("loss", [], True), ("scores", ["batch", 4])]}
    made = ORTTrainer(net(), description, SGD, nn.CrossEntropyLoss())
    with pytest.raises(
        ValueError, match=r"output 'scores' has shape \[6, 5\], model_desc says \['batch', 4\]: axis 1 is 5"
    ):
        made.train_step(*batch(0))


class WithLoss(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.net, self.kind = net(), kind

    def forward(self, x: Tensor, y: Tensor) -> Any:
        scores = self.net(x)
        loss = nn.functional.cross_entropy(scores, y)
        given: dict[str, Any] = {"tuple": (loss, scores), "dict": {"scores": scores, "loss": loss}, "loss": loss}
        return given[self.kind]


@pytest.mark.parametrize("kind", ["tuple", "dict", "loss"])
def test_a_model_may_give_its_loss_itself(kind: str) -> None:
    description = {**DESCRIPTION, "outputs": DESCRIPTION["outputs"][: 1 if kind == "loss" else 2]}
    model, plain = WithLoss(kind), net()
    made = ORTTrainer(model, description, optim.SGDConfig(lr=0.1))
    found = [made.train_step(*batch(step)) for step in range(3)]
    expected = by_hand(plain, torch.optim.SGD(plain.parameters(), 0.1), 3, clip=None)
    assert [float(r if kind == "loss" else r[0]) for r in found] == pytest.approx(expected, rel=1e-5)
    assert_alike(model.net, plain)


class Two(nn.Module):
    def forward(self, x: Tensor, *, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return x * 2, x + 1


def test_a_loss_takes_the_parts_of_what_a_model_returns_if_it_can() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(7, 7)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = self.line(x)
            return y, y * 2

    def apart(a: Tensor, b: Tensor, y: Tensor, z: Tensor) -> Tensor:
        return (a * y).sum() + (b * z).sum()

    def together(outputs: tuple[Tensor, Tensor], y: Tensor) -> Tensor:
        return (outputs[0] * y).sum() + (outputs[1] * y).sum()

    shape = [6, 7]
    x, y = torch.rand(6, 7), torch.rand(6, 7)
    for loss, labels in ((apart, ["y", "z"]), (together, ["y"])):
        description = {
            "inputs": [(name, shape) for name in ("x", *labels)],
            "outputs": [("a", shape), ("loss", [], True), ("b", shape)],
        }
        torch.manual_seed(0)
        a, found, b = ORTTrainer(Both(), description, SGD, loss).train_step(x, *[y] * len(labels))
        torch.testing.assert_close(found, (a * y).sum() + (b * y).sum())


def test_frozen_weights_stay() -> None:
    ours, plain = copies(2)
    made = trainer(ours, SGD, {"utils": {"frozen_weights": ["first.weight", "norm.running_mean"]}})
    losses(made, 3)
    torch.testing.assert_close(ours.first.weight, plain.first.weight, rtol=0, atol=0)
    assert not ours.first.weight.requires_grad and not torch.equal(ours.last.weight, plain.last.weight)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_mixed_precision_trains_as_autocast_does(dtype: str) -> None:
    ours, plain = copies(2)
    made = trainer(ours, optim.SGDConfig(lr=0.1), {"mixed_precision": {"enabled": True, "dtype": dtype}})
    found = losses(made, 5)
    region = partial(torch.autocast, "cpu", torch.float16 if dtype == "fp16" else torch.bfloat16)
    expected = by_hand(plain, torch.optim.SGD(plain.parameters(), 0.1), 5, clip=None, region=region)
    tolerance = 2e-2 if dtype == "bf16" else 5e-3
    assert found == pytest.approx(expected, rel=tolerance)
    assert made.train_step_info.all_finite and made.train_step_info.optimization_step == 5


def test_a_step_that_overflows_is_left_out_and_the_scale_halves() -> None:
    scaler = amp.DynamicLossScaler(loss_scale=2.0**10, up_scale_window=2)
    ours, plain = copies(2)
    made = trainer(ours, SGD, {"mixed_precision": {"enabled": True, "loss_scaler": scaler}})
    x, y = batch(0)
    made.train_step(x * math.inf, y)
    for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    info = made.train_step_info
    assert (info.all_finite, info.step, info.optimization_step, scaler.loss_scale) == (False, 1, 0, 2.0**9)
    ours.norm.reset_running_stats()
    for step in range(2):
        made.train_step(*batch(step))
    assert (info.all_finite, info.optimization_step, scaler.loss_scale) == (True, 2, 2.0**10)
    scaler.loss_scale = 2.0**60  # above what gradients of 16 bits hold
    made.train_step(x, y)
    assert not info.all_finite
    scaler.reset()
    assert scaler.loss_scale == 2.0**10


@pytest.mark.parametrize(
    "options",
    [
        {"graph_transformer": {"gelu_recompute": True}},
        {"graph_transformer": {"transformer_layer_recompute": True}},
        {"graph_transformer": {"memory_budget": 0.5}},
        {"device": {"id": "cpu", "mem_limit": 2**26}},
        {"debug": {"check_model_export": True, "deterministic_compute": True}},
    ],
)
def test_options_of_memory_and_checks_leave_the_numbers_alone(options: dict[str, Any]) -> None:
    ours, plain = copies(2)
    found = losses(trainer(ours, SGD, options), 2)
    assert found == pytest.approx(by_hand(plain, torch.optim.SGD(plain.parameters(), 0.1), 2, clip=None))


@pytest.mark.parametrize("elsewhere", [False, True], ids=["", "where the environment wants graphs elsewhere"])
def test_graphs_are_written_where_they_are_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, elsewhere: bool
) -> None:
    if elsewhere:
        monkeypatch.setenv("ORTMODULE_SAVE_ONNX_PATH", str(tmp_path / "elsewhere"))
    names = ("after_graph_transforms", "with_gradient_graph", "with_training_graph")
    paths = {f"model_{name}_path": str(tmp_path / f"{name}.onnx") for name in names}
    losses(trainer(net(), SGD, {"debug": {"graph_save_paths": paths}}), 2)
    forward, joint, same = (onnx.load(path) for path in paths.values())
    assert joint == same and len(joint.graph.node) > len(forward.graph.node) > 0


def test_a_model_with_more_than_one_input_of_any_name() -> None:
    class Open(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def forward(self, *args: Tensor) -> Tensor:
            return self.net(args[0] + args[1])

    torch.manual_seed(0)
    description = {**DESCRIPTION, "inputs": [("a", [6, 7]), ("b", [6, 7]), ("y", [6])]}
    made = ORTTrainer(Open(), description, SGD, nn.CrossEntropyLoss())
    x, y = batch(0)
    loss, _ = made.train_step(x, x, y)
    torch.testing.assert_close(loss, nn.functional.cross_entropy(net().train()(2 * x), y))


def test_a_step_that_fails_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was added up since the last update is dropped with it, and the next good call works."""
    ours, plain = copies(2)
    made = trainer(ours, SGD, {"batch": {"gradient_accumulation_steps": 2}})
    with monkeypatch.context() as patch:
        patch.setattr(type(made._optimizer), "step", fails)
        made.train_step(*batch(0))
        with pytest.raises(MemoryError):
            made.train_step(*batch(1))
    assert (made.train_step_info.step, made.train_step_info.optimization_step) == (0, 0)
    plain.load_state_dict(ours.state_dict())
    losses(made, 4)
    by_hand(plain, torch.optim.SGD(plain.parameters(), 0.1), 4, clip=None, accumulate=2)
    assert_alike(ours, plain)


def fails(*_: Any, **__: Any) -> None:
    raise MemoryError


def test_outputs_are_of_the_model_before_the_update() -> None:
    class Shows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(7, 5)

        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            return nn.functional.cross_entropy(self.line(x), y), self.line.weight

    model = Shows()
    description = {**DESCRIPTION, "outputs": [("loss", [], True), ("weight", [5, 7])]}
    before = model.line.weight.detach().clone()
    _, weight = ORTTrainer(model, description, optim.SGDConfig(lr=1.0)).train_step(*batch(0))
    assert torch.equal(weight, before) and not torch.equal(model.line.weight, before)


def test_gradients_from_before_are_dropped_and_no_grad_around_is_not_meant() -> None:
    ours, plain = copies(2)
    ours(batch(0)[0]).sum().backward()
    ours.norm.reset_running_stats()
    made = trainer(ours, SGD)
    with torch.no_grad():
        losses(made, 2)
    by_hand(plain, torch.optim.SGD(plain.parameters(), 0.1), 2, clip=None)
    assert_alike(ours, plain)


def test_a_loss_whose_last_argument_is_optional_is_given_what_it_needs() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(7, 5)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.line(x), x

    def loss(outputs: tuple[Tensor, Tensor], y: Tensor, weight: Tensor | None = None) -> Tensor:
        assert weight is None
        return nn.functional.cross_entropy(outputs[0], y)

    assert ORTTrainer(Pair(), DESCRIPTION, SGD, loss).train_step(*batch(0))[0].shape == ()


def test_arguments_that_are_positional_alone_are_given_so() -> None:
    class Positional(Net):
        def forward(self, x: Tensor, /) -> Tensor:
            return super().forward(x)

    torch.manual_seed(0)
    found = trainer(Positional()).train_step(*batch(0))[0]
    torch.testing.assert_close(found, trainer(net()).train_step(*batch(0))[0])


def test_outputs_by_name_have_all_of_their_names() -> None:
    description = {**DESCRIPTION, "outputs": [("loss", [], True), ("probs", ["batch", 5])]}
    made = ORTTrainer(WithLoss("dict"), description, SGD)
    with pytest.raises(ValueError, match="the model returned scores, loss, and model_desc has 'probs'"):
        made.train_step(*batch(0))


def test_names_of_frozen_weights_may_be_in_groups() -> None:
    config = optim.AdamConfig([{"params": ["first.weight", "norm.running_mean"], "lambda_coef": 0.1}])
    losses(trainer(net(), config, {"utils": {"frozen_weights": ["first.weight"]}}), 1)


def test_a_schedule_may_give_a_number() -> None:
    class Halved(optim.lr_scheduler._LRScheduler):
        def get_lr(self, train_step_info: TrainStepInfo) -> Any:
            assert train_step_info.step == 2  # asked for at updates, the step being counted
            return train_step_info.optimizer_config.lr / 2

    ours, plain = copies(2)
    options = {"lr_scheduler": Halved(), "batch": {"gradient_accumulation_steps": 2}}
    losses(trainer(ours, SGD, options), 2)
    by_hand(plain, torch.optim.SGD(plain.parameters(), 0.05), 2, clip=None, accumulate=2)
    assert_alike(ours, plain)
