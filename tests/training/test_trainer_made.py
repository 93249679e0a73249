"""What the ORTTrainer of ``ortmodule_c.training`` is made of: what it takes, and what it refuses by name."""

from typing import Any

import onnx
import pytest
import torch
from onnx import TensorProto, helper
from torch import Tensor, nn
from trained import DESCRIPTION, batch, by_hand, net

import ortmodule_c
from ortmodule_c.training import ORTTrainer, ORTTrainerOptions, TrainStepInfo, amp, optim

SGD = optim.SGDConfig()


def test_options_have_their_defaults_and_what_is_said() -> None:
    options = ORTTrainerOptions({"batch": {"gradient_accumulation_steps": 4}, "utils": {"frozen_weights": ["a"]}})
    assert options.batch.gradient_accumulation_steps == 4
    assert options.utils.frozen_weights == ["a"] and options.utils.grad_norm_clip
    assert not options.mixed_precision.enabled and options.distributed.deepspeed_zero_optimization.stage == 0
    assert ORTTrainerOptions() == ORTTrainerOptions({}) != options
    assert '"gradient_accumulation_steps": 4' in repr(options)


def test_options_cannot_be_set() -> None:
    options = ORTTrainerOptions()
    with pytest.raises(AttributeError, match="gradient_accumulation_steps cannot be set"):
        options.batch.gradient_accumulation_steps = 2
    with pytest.raises(AttributeError, match="there is no option size, but gradient_accumulation_steps"):
        _ = options.batch.size


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"batches": {}}, "there is no batches, expected one of batch, device"),
        ({"batch": {"steps": 2}}, "there is no batch.steps, expected one of gradient_accumulation_steps"),
        ({"batch": 2}, "batch is 2, expected a dict"),
        ({"batch": {"gradient_accumulation_steps": 0}}, "batch.gradient_accumulation_steps is 0, .* at least 1"),
        ({"batch": {"gradient_accumulation_steps": True}}, "is True, expected a whole number"),
        ({"device": {"id": "gpu"}}, "device.id is 'gpu', expected a device"),
        ({"distributed": {"enable_adasum": True}}, "enable_adasum is True, expected False: gradients of processes"),
        ({"distributed": {"horizontal_parallel_size": 2}}, "expected 1: models are not split"),
        (
            {"distributed": {"pipeline_parallel": {"pipeline_parallel_size": 2}}},
            "pipeline_parallel.pipeline_parallel_size",
        ),
        ({"distributed": {"deepspeed_zero_optimization": {"stage": 2}}}, "stage is 2, expected 0 or 1"),
        ({"lr_scheduler": 0.1}, "lr_scheduler is 0.1, expected one of optim.lr_scheduler"),
        ({"mixed_precision": {"loss_scaler": 8.0}}, "loss_scaler is 8.0, expected one of amp"),
        ({"mixed_precision": {"dtype": "fp8"}}, "dtype is 'fp8', expected 'fp16' or 'bf16'"),
        ({"utils": {"frozen_weights": "a"}}, "frozen_weights is 'a', expected a list of names"),
        ({"provider_options": {"a": 1}}, "provider_options is .* ONNX Runtime's"),
        ({"session_options": 1}, "session_options is 1"),
        ([], "they is .*expected a dict"),
    ],
)
def test_options_that_there_are_not_are_refused_by_their_whole_name(given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ORTTrainerOptions(given)


def made(
    model: Any = None, description: Any = DESCRIPTION, config: Any = SGD, loss: Any = None, options: Any = None
) -> ORTTrainer:
    loss_fn = nn.functional.cross_entropy if loss is None else loss
    return ORTTrainer(net() if model is None else model, description, config, loss_fn, ORTTrainerOptions(options))


INPUTS, OUTPUTS = DESCRIPTION["inputs"], DESCRIPTION["outputs"]


@pytest.mark.parametrize(
    ("description", "message"),
    [
        ({"inputs": INPUTS}, r"model_desc has \['inputs'\], expected"),
        ({"inputs": [], "outputs": OUTPUTS}, r"model_desc\['inputs'\] is \[\]"),
        ({"inputs": [("x",)], "outputs": OUTPUTS}, r"model_desc\['inputs'\]\[0\] is .* expected a tuple of 2 elements"),
        ({"inputs": [("x", [], True)], "outputs": OUTPUTS}, r"expected a tuple of 2 elements"),
        ({"inputs": [("", [])], "outputs": OUTPUTS}, "has '' for its name"),
        ({"inputs": [("x", 3)], "outputs": OUTPUTS}, "has 3 for its shape"),
        ({"inputs": [("x", [1.5])], "outputs": OUTPUTS}, r"has \[1.5\] for its shape"),
        ({"inputs": [*INPUTS, INPUTS[0]], "outputs": OUTPUTS}, "has 'x' twice"),
        ({"inputs": INPUTS, "outputs": [("loss", [], 1)]}, "has 1 for whether it is the loss"),
        ({"inputs": INPUTS, "outputs": [("a", [], True), ("b", [], True)]}, r"has the losses \['a', 'b'\]"),
        ({"inputs": INPUTS, "outputs": [("scores", [6, 5])]}, "says of no output that it is the loss"),
        ({"inputs": INPUTS[:1], "outputs": OUTPUTS}, "forward takes all inputs of model_desc: x"),
        ({"inputs": [("z", [6, 7]), ("y", [6])], "outputs": OUTPUTS}, "model_desc lacks 'x', and forward takes x"),
        ({"inputs": INPUTS[::-1], "outputs": OUTPUTS}, "model_desc has labels before inputs of the model: y, x"),
    ],
)
def test_descriptions_that_do_not_fit_are_refused(description: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        made(description=description)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": 3}, "model is a int, expected torch.nn.Module or onnx.ModelProto"),
        ({"description": 3}, "model_desc is a int, expected a dict"),
        ({"config": 3}, "optim_config is a int, expected AdamConfig"),
        ({"loss": 3}, "loss_fn is a int, expected a function"),
    ],
)
def test_arguments_of_another_kind_are_refused(arguments: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        made(**arguments)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"utils": {"frozen_weights": ["last"]}}, "frozen_weights has 'last', which is no parameter"),
        ({"distributed": {"world_size": 2}}, r"world_size is 2, and torch.distributed has 1 process\(es\)"),
        ({"distributed": {"data_parallel_size": 2}}, "data_parallel_size is 2, with world_size=1"),
        ({"mixed_precision": {"loss_scaler": amp.LossScaler(8.0)}}, "and mixed_precision.enabled is False"),
        (
            {"mixed_precision": {"enabled": True, "dtype": "bf16", "loss_scaler": amp.LossScaler(8.0)}},
            "and bf16 needs none",
        ),
        ({"_internal_use": {"extra_postprocess": lambda m: m}}, "changes models of ONNX, and this one is a module"),
        ({"device": {"mem_limit": 100}}, "memory_budget is 100, expected at least"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        made(options=options)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: optim.SGDConfig(lr=-1.0), "lr is -1.0, expected at least 0"),
        (lambda: optim.AdamConfig(lr=float("nan")), "lr is nan"),
        (lambda: optim.SGDConfig([{"params": ["a"], "lr": 1.0}]), "has a learning rate, which all parameters share"),
        (lambda: optim.AdamConfig([{"params": ["a"]}]), r"params\[0\] is .* and of numbers"),
        (lambda: optim.AdamConfig([{"params": ["a"], "gamma": 1}]), "has 'gamma', expected one of lr, alpha"),
        (lambda: optim.AdamConfig([{"params": ["a"], "beta": -1}]), r"params\[0\]: beta is -1"),
        (lambda: optim.LambConfig([{"params": ["a"], "max_norm_clip": 2.0}]), "the norm is of all gradients"),
        (lambda: made(config=optim.AdamConfig([{"params": ["a"], "alpha": 0.5}])), "names 'a', which is no parameter"),
        (lambda: made(config=optim.AdamConfig([{"params": ["last.bias"] * 2, "alpha": 0.5}])), "which is there before"),
        (lambda: optim.lr_scheduler.LinearWarmupLRScheduler(0), "total_steps is 0"),
        (lambda: optim.lr_scheduler.LinearWarmupLRScheduler(9, 1.0), "warmup is 1.0"),
        (lambda: optim.lr_scheduler.CosineWarmupLRScheduler(9, 0.0), "cycles is 0.0"),
        (lambda: optim.lr_scheduler.PolyWarmupLRScheduler(9, -1.0), "lr_end is -1.0"),
        (lambda: amp.LossScaler(0.0), "loss_scale is 0.0, expected a finite number above 0"),
        (lambda: amp.DynamicLossScaler(up_scale_window=0), "up_scale_window is 0"),
        (lambda: amp.DynamicLossScaler(min_loss_scale=8.0, max_loss_scale=4.0), "min_loss_scale is 8.0, above"),
        (lambda: amp.DynamicLossScaler(loss_scale=0.25), "loss_scale is 0.25, expected 1.0 to"),
        (lambda: TrainStepInfo(SGD, step=-1), "step is -1, expected at least 0"),
    ],
)
def test_numbers_out_of_their_range_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_schedule_that_ends_above_the_learning_rate_is_refused_at_the_step() -> None:
    schedule = optim.lr_scheduler.PolyWarmupLRScheduler(9, lr_end=0.5)
    with pytest.raises(ValueError, match=r"lr_end is 0\.5, not below the learning rate 0\.001"):
        made(options={"lr_scheduler": schedule}).train_step(*batch(0))


def test_a_dynamic_scale_stays_within_its_bounds() -> None:
    scaler = amp.DynamicLossScaler(loss_scale=4.0, up_scale_window=1, min_loss_scale=2.0, max_loss_scale=8.0)
    seen = [scaler.update(TrainStepInfo(SGD, all_finite=finite)) for finite in (True, True, False, False, False)]
    assert seen == [8.0, 8.0, 4.0, 2.0, 2.0]
    assert amp.DynamicLossScaler(False, 4.0).update(TrainStepInfo(SGD, all_finite=False)) == 4.0


def perceptron() -> onnx.ModelProto:
    """The loss of two layers, in ONNX's terms."""
    torch.manual_seed(0)
    first, last = nn.Linear(7, 13, bias=False), nn.Linear(13, 5)
    weights = {"w1": first.weight.T, "w2": last.weight.T, "b2": last.bias}
    floats, ints = TensorProto.FLOAT, TensorProto.INT64
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["x", "w1"], ["h"]),
            helper.make_node("Relu", ["h"], ["r"]),
            helper.make_node("Gemm", ["r", "w2", "b2"], ["scores"]),
            helper.make_node("SoftmaxCrossEntropyLoss", ["scores", "y"], ["loss"]),
        ],
        "main",
        [helper.make_tensor_value_info("y", ints, ["n"]), helper.make_tensor_value_info("x", floats, ["n", 7])],
        [helper.make_tensor_value_info("scores", floats, ["n", 5]), helper.make_tensor_value_info("loss", floats, [])],
        [onnx.numpy_helper.from_array(w.detach().contiguous().numpy(), name) for name, w in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for stored in perceptron().graph.initializer:
            self.register_parameter(
                stored.name, nn.Parameter(torch.from_numpy(onnx.numpy_helper.to_array(stored).copy()))
            )

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x @ self.w1) @ self.w2 + self.b2


def test_a_model_of_onnx_is_trained_by_its_own_names() -> None:
    plain = Perceptron()
    trainer = ORTTrainer(perceptron(), DESCRIPTION, optim.AdamConfig(lr=0.01))
    found = [trainer.train_step(*batch(step))[0].item() for step in range(4)]
    expected = by_hand(plain, torch.optim.Adam(plain.parameters(), 0.01), 4)
    assert found == pytest.approx(expected, rel=1e-5)
    state = trainer.state_dict(pytorch_format=True)
    for name, p in plain.named_parameters():
        torch.testing.assert_close(state[name], p.detach(), rtol=1e-5, atol=1e-5)


def test_a_trained_model_of_onnx_is_written_with_its_weights(tmp_path: Any) -> None:
    trainer = ORTTrainer(perceptron(), DESCRIPTION, optim.SGDConfig(lr=0.1))
    trainer.train_step(*batch(0))
    trainer.save_as_onnx(tmp_path / "model.onnx")
    x, y = batch(1)
    read = ortmodule_c.onnx.load(tmp_path / "model.onnx")
    torch.testing.assert_close(read(y, x)[1], trainer.eval_step(x, y)[0])


@pytest.mark.parametrize(
    ("description", "options", "message"),
    [
        ({**DESCRIPTION, "inputs": INPUTS[:1]}, {}, "has the inputs x and outputs loss, scores, the model y, x and"),
        ({**DESCRIPTION, "outputs": [("cost", [], True)]}, {}, "outputs cost, the model y, x and scores, loss"),
        (DESCRIPTION, {"mixed_precision": {"enabled": True}}, "mixed_precision.enabled is for modules"),
        (DESCRIPTION, {"graph_transformer": {"gelu_recompute": True}}, "gelu_recompute is for modules"),
        (DESCRIPTION, {"debug": {"graph_save_paths": {"model_with_gradient_graph_path": "a"}}}, "is for modules"),
    ],
)
def test_what_a_model_of_onnx_does_not_take_is_refused(description: Any, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ORTTrainer(perceptron(), description, SGD, None, ORTTrainerOptions(options))


def test_a_model_of_onnx_may_be_changed_before_it_is_trained() -> None:
    def with_l1(model: onnx.ModelProto) -> onnx.ModelProto:
        model.graph.node[1].op_type = "Abs"
        return model

    options = ORTTrainerOptions({"_internal_use": {"extra_postprocess": with_l1}})
    x, y = batch(0)
    changed, plain = (ORTTrainer(perceptron(), DESCRIPTION, SGD, None, o).eval_step(x, y)[1] for o in (options, None))
    w = Perceptron()
    torch.testing.assert_close(changed, (x @ w.w1).abs() @ w.w2 + w.b2)
    torch.testing.assert_close(plain, w(x))
    with pytest.raises(ValueError, match="a model of ONNX has its loss among its outputs"):
        ORTTrainer(perceptron(), DESCRIPTION, SGD, nn.functional.cross_entropy)


def test_a_trained_module_is_written_as_onnx(tmp_path: Any) -> None:
    ours = net()
    trainer = made(ours)
    with pytest.raises(RuntimeError, match="save_as_onnx comes after a step"):
        trainer.save_as_onnx(tmp_path / "model.onnx")
    trainer.train_step(*batch(0))
    trainer.train_step_info.fetches = ["scores"]
    trainer.eval_step(batch(1, 1)[0])  # one row, and the size stays open
    trainer.save_as_onnx(tmp_path / "model.onnx")
    model = onnx.load(tmp_path / "model.onnx")
    assert [i.name for i in model.graph.input] == ["x"] and [o.name for o in model.graph.output] == ["scores"]
    assert {t.name for t in model.graph.initializer} >= {"first.weight", "last.bias", "norm.running_mean"}
    read = ortmodule_c.onnx.load(model)
    for n in (6, 9):
        torch.testing.assert_close(read(batch(1, n)[0]), ours.eval()(batch(1, n)[0]))
