"""The trainers under Optimum's names, beside those of transformers."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from ortmodule_c import ORTModule
from ortmodule_c.optim import FusedAdam
from side_by_side import assert_ran_in_core, close, gpt2, library
from test_trainer import Texts

transformers = library("transformers")
library("accelerate")
trainers = library("ortmodule_c.trainer")

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.mark.parametrize("missing", ["transformers", "accelerate"])
def test_what_it_needs_is_named_where_that_is_not_installed(missing: str) -> None:
    script = f"import sys; sys.modules[{missing!r}] = None; import ortmodule_c.trainer"
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    needed = 'ImportError: ortmodule_c.trainer needs transformers and accelerate (pip install "ortmodule_c[trainer]"): '
    assert ran.returncode == 1 and ran.stderr.splitlines()[-1].startswith(needed) and missing in ran.stderr


def t5() -> nn.Module:
    """An encoder and decoder of one layer without dropout, with the same weights at each call."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 1, "num_heads": 2}
    ends = {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, **ends, dropout_rate=0.0))


def shifted(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    """A batch with what a decoder is given, where labels do not reach it because they are smoothed."""
    ids = torch.stack([row["input_ids"] for row in rows])
    return {"input_ids": ids, "labels": ids, "decoder_input_ids": ids.roll(1, 1)}


def settings(folder: Path, **more: Any) -> dict[str, Any]:
    """Four steps, an evaluation and a checkpoint after each second."""
    said = {
        "output_dir": str(folder),
        "max_steps": 4,
        "logging_steps": 1,
        "save_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 8,
        "learning_rate": 0.1,
        "optim": "sgd",
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
    }
    return {**said, **more}


def history(trainer: Any) -> dict[str, list[float]]:
    """Losses and norms, by name."""
    names = ("loss", "grad_norm", "eval_loss")
    return {name: [e[name] for e in trainer.state.log_history if name in e] for name in names}


def trained(kind: Any, arguments: Any, model: nn.Module, folder: Path, resume: Any = None, **more: Any) -> Any:
    """A trainer that has trained."""
    args = arguments(**settings(folder, **more))
    trainer = kind(model, args, shifted, Texts(), Texts())
    trainer.train(resume_from_checkpoint=resume)
    return trainer


# Of what is zero but for rounding it makes steps too, unless `eps` is large.
ADAMW = {"optim": "adamw_torch", "learning_rate": 1e-3, "weight_decay": 0.1, "adam_epsilon": 1e-3}
CASES: list[tuple[dict[str, Any], dict[str, Any], torch.dtype]] = [
    ({}, {}, torch.float32),
    ({}, {"memory_budget": 0.0, "use_module_with_loss": True}, torch.float32),
    (ADAMW, {"optim": "adamw_ort_fused"}, torch.float32),
    ({"bf16": True}, {}, torch.bfloat16),
    ({"label_smoothing_factor": 0.1, "gradient_accumulation_steps": 2}, {}, torch.float32),
]


@pytest.mark.parametrize(("both", "ours", "dtype"), CASES, ids=["sgd", "budget", "adamw", "bf16", "smoothing"])
@pytest.mark.parametrize("make", [gpt2, t5])
def test_training(
    make: Callable[[], nn.Module], both: dict[str, Any], ours: dict[str, Any], dtype: torch.dtype, tmp_path: Path
) -> None:
    seq2seq = make is t5
    name = "Seq2SeqTrain" if seq2seq else "Train"
    kinds = [
        (getattr(library_, f"{prefix}{name}er"), getattr(library_, f"{prefix}{name}ingArguments"))
        for library_, prefix in ((transformers, ""), (trainers, "ORT"))
    ]
    plain = trained(*kinds[0], make(), tmp_path / "plain", **both)
    core = trained(*kinds[1], make(), tmp_path / "ours", **{**both, **ours})
    for what, losses in history(plain).items():
        assert losses
        close(history(core)[what], losses, dtype)
    close(dict(core.model.state_dict()), dict(plain.model.state_dict()), dtype)
    assert type(core.model) is not type(plain.model) and isinstance(core.model, type(plain.model))
    assert_ran_in_core(core.model)
    if core.label_smoother is not None:
        assert_ran_in_core(core.label_smoother._loss)
    if seq2seq:  # generates as the plain one
        for trainer in (plain, core):
            trainer.args.predict_with_generate, trainer.args.generation_max_length = True, 6
        assert (core.predict(Texts()).predictions == plain.predict(Texts()).predictions).all()


def test_checkpoints_are_those_of_the_plain_trainer(tmp_path: Path) -> None:
    """The same files, and either goes on from those of the other."""
    kinds = {
        "plain": (transformers.Trainer, transformers.TrainingArguments, {"optim": "adamw_torch"}),
        "ours": (trainers.ORTTrainer, trainers.ORTTrainingArguments, {"optim": "adamw_ort_fused"}),
    }
    said = {"learning_rate": 1e-3, "adam_epsilon": 1e-3}
    made = {n: trained(k, a, gpt2(), tmp_path / n, **said, **o) for n, (k, a, o) in kinds.items()}
    for name, (kind, arguments, more) in kinds.items():
        other = "plain" if name == "ours" else "ours"
        checkpoint = tmp_path / other / "checkpoint-2"
        again = trained(kind, arguments, gpt2(), tmp_path / "again", str(checkpoint), **said, **more)
        close(history(again)["eval_loss"][-1], history(made[name])["eval_loss"][-1])
    files = [sorted(p.name for p in (tmp_path / n / "checkpoint-4").iterdir()) for n in kinds]
    assert files[0] == files[1]
    assert type(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours" / "checkpoint-4")) is type(gpt2())


def test_the_optimizer_and_its_groups(tmp_path: Path) -> None:
    args = trainers.ORTTrainingArguments(
        **settings(tmp_path, optim="adamw_ort_fused", weight_decay=0.1, adam_beta1=0.8)
    )
    trainer = trainers.ORTTrainer(gpt2(), args, train_dataset=Texts(), eval_dataset=Texts())
    optimizer = trainer.create_optimizer()
    assert type(optimizer) is FusedAdam
    assert [(g["weight_decay"], g["betas"], g["lr"]) for g in optimizer.param_groups] == [
        (0.1, (0.8, 0.999), 0.1),
        (0.0, (0.8, 0.999), 0.1),
    ]


class Returning(transformers.GPT2LMHeadModel):  # type: ignore[name-defined, misc]
    """A user's own model, whose forward gives a tuple."""

    def forward(self, input_ids: Tensor, labels: Tensor, **_: Any) -> Any:
        out = super().forward(input_ids, labels=labels)
        return out.loss, out.logits


def of_users() -> nn.Module:
    torch.manual_seed(0)
    return Returning(gpt2().config)


class Reading(trainers.ORTTrainer):  # type: ignore[name-defined, misc]
    """A trainer that reads logits in each step."""

    seen: ClassVar[list[Tensor]] = []

    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        outputs = model(**inputs)
        self.seen.append(outputs.logits)
        return (outputs.loss, outputs) if return_outputs else outputs.loss


class Predicting(trainers.ORTTrainer):  # type: ignore[name-defined, misc]
    """A trainer that predicts with dropout."""

    def prediction_step(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return super().prediction_step(model.train(), *args, **kwargs)


class Asking(transformers.TrainerCallback):  # type: ignore[name-defined, misc]
    """A callback that runs the model between two steps of training."""

    def on_step_end(self, *_: Any, model: nn.Module, **__: Any) -> None:
        assert model.training and model(torch.zeros(1, 4, dtype=torch.int64)).logits.shape == (1, 4, 64)


def loss_func(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    return outputs["logits"].float().logsumexp(-1).mean() + 0 * labels.sum()


def without_names(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {**shifted(rows[:4]), "decoder_input_ids": None, "return_dict": False}


def prepared(tmp_path: Path, kind: Any = trainers.ORTTrainer, make: Any = gpt2, said: Any = None, **more: Any) -> Any:
    args = trainers.ORTTrainingArguments(**settings(tmp_path, **(said or {})))
    return kind(make(), args, train_dataset=Texts(), eval_dataset=Texts(), **more)


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each training call of a wrapper with gradients has given its caller logits."""
    calls: list[bool] = []
    run = ORTModule._ort_run

    def spy(self: ORTModule, args: Any, kwargs: Any) -> Any:
        out = run(self, args, kwargs)
        if self.training and torch.is_grad_enabled() and isinstance(out, dict):
            calls.append(out.get("logits") is not None)
        return out

    monkeypatch.setattr(ORTModule, "_ort_run", spy)
    return calls


def test_a_training_step_computes_no_logits_and_other_calls_do(tmp_path: Path, given: list[bool]) -> None:
    trainer = prepared(tmp_path)
    trainer.train()
    assert given == [False] * 4
    assert trainer.model.train()(torch.zeros(1, 4, dtype=torch.int64)).logits is not None
    Reading.seen.clear()
    reading = prepared(tmp_path, Reading)
    reading.train()
    assert len(Reading.seen) >= 4 and all(isinstance(logits, Tensor) for logits in Reading.seen)


@pytest.mark.parametrize(
    ("make", "more"),
    [
        (gpt2, {"compute_loss_func": loss_func}),
        (gpt2, {"data_collator": without_names}),
        (of_users, {}),
    ],
    ids=["loss_func", "return_dict=False", "tuple"],
)
def test_a_step_that_reads_more_is_given_more(tmp_path: Path, make: Any, more: Any) -> None:
    args = transformers.TrainingArguments(**settings(tmp_path, eval_strategy="no"))
    plain = transformers.Trainer(make(), args, train_dataset=Texts(), **more)
    plain.train()
    ours = prepared(tmp_path, make=make, said={"eval_strategy": "no"}, **more)
    ours.train()
    close(history(ours)["loss"], history(plain)["loss"])


def test_what_looks_on_sees_the_outputs(tmp_path: Path, given: list[bool]) -> None:
    """Callbacks, a hook on the model, predictions in training mode, and a trainer that is changed before it trains."""
    prepared(tmp_path, callbacks=[Asking()]).train()
    trainer = prepared(tmp_path)
    seen: list[Any] = []
    hook = trainer.model.register_forward_hook(lambda _module, _args, out: seen.append(out.logits))
    trainer.train()
    assert len(seen) >= 4 and all(isinstance(logits, Tensor) for logits in seen)
    hook.remove()
    assert prepared(tmp_path, Predicting).predict(Texts()).predictions.shape[-1] == 64
    trainer.compute_loss_func = loss_func
    trainer.train()
    given.clear()
    again = trainers.ORTTrainer(
        trainer.model,
        trainers.ORTTrainingArguments(**settings(tmp_path, label_smoothing_factor=0.1)),
        shifted,
        Texts(),
        Texts(),
    )
    again.train()
    assert given == [True] * 4


def test_a_smoothed_loss_has_the_options_and_the_smoothing_of_now(tmp_path: Path) -> None:
    said = {"label_smoothing_factor": 0.1, "memory_budget": 0.5, "save_onnx": True, "onnx_prefix": "net"}
    trainer = prepared(tmp_path, said=said, data_collator=shifted)
    trainer.train()
    names = {p.name for p in tmp_path.glob("*.onnx")}
    assert {"net_joint_training.onnx", "net_loss_joint_training.onnx"} <= names
    logits, labels = torch.randn(2, 5, 8), torch.randint(8, (2, 5))
    for epsilon in (0.1, 0.4):
        trainer.label_smoother.epsilon = epsilon
        wanted = transformers.trainer_pt_utils.LabelSmoother(epsilon)((logits,), labels)
        close(trainer.label_smoother((logits,), labels), wanted)


def test_a_model_made_by_the_trainer_and_one_that_is_wrapped(tmp_path: Path) -> None:
    states = []
    for kind in (transformers.Trainer, trainers.ORTTrainer):
        args = trainers.ORTTrainingArguments(**settings(tmp_path))
        made = kind(args=args, model_init=gpt2, train_dataset=Texts(), eval_dataset=Texts())
        made.train()
        states.append(dict(made.model.state_dict()))
    assert_ran_in_core(made.model)
    close(states[1], states[0])
    wrapper = ORTModule(gpt2(), outputs=["loss"])
    assert trainers.ORTTrainer(wrapper, args, train_dataset=Texts(), eval_dataset=Texts()).model is wrapper
    args = trainers.ORTTrainingArguments(**settings(tmp_path, memory_budget=0.5))
    with pytest.warns(UserWarning, match="the model is an ORTModule, which memory_budget came too late for"):
        trainers.ORTTrainer(wrapper, args, train_dataset=Texts(), eval_dataset=Texts())


def test_graphs_are_written(tmp_path: Path) -> None:
    said = settings(tmp_path / "out", save_onnx=True, onnx_prefix="net", onnx_log_level="WARNING", max_steps=1)
    trainers.ORTTrainer(
        gpt2(), trainers.ORTTrainingArguments(**said), train_dataset=Texts(), eval_dataset=Texts()
    ).train()
    assert {p.name.split("_")[0] for p in (tmp_path / "out").glob("*.onnx")} == {"net"}


def test_arguments_are_parsed_and_written(tmp_path: Path) -> None:
    parser = transformers.HfArgumentParser(trainers.ORTTrainingArguments)
    line = ["--output_dir", str(tmp_path), "--optim", "adamw_ort_fused", "--memory_budget", "0.5", "--use_cpu"]
    [args] = parser.parse_args_into_dataclasses(line)
    assert (args.optim, args.memory_budget, args.save_onnx) == ("adamw_ort_fused", 0.5, False)
    assert args.to_dict()["optim"] == "adamw_ort_fused" and '"optim": "adamw_ort_fused"' in args.to_json_string()
    [again] = parser.parse_dict({"output_dir": str(tmp_path), "optim": args.optim, "use_cpu": True})
    assert again.optim == args.optim
    assert args.set_optimizer("sgd").set_optimizer("adamw_ort_fused", learning_rate=0.5).optim == "adamw_ort_fused"
    assert args.learning_rate == 0.5
    args.optim = "sgd"  # as a search over hyperparameters sets it
    assert trainers.ORTTrainer.get_optimizer_cls_and_kwargs(args)[0] is torch.optim.SGD
    assert trainers.ORTTrainingArguments(str(tmp_path), memory_budget=1, use_cpu=True).memory_budget == 1.0
    assert trainers.ORTSeq2SeqTrainingArguments(str(tmp_path), predict_with_generate=True, use_cpu=True).optim


def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="adamw_ort is not a valid OptimizerNames"):
        trainers.ORTTrainingArguments(str(tmp_path), optim="adamw_ort", use_cpu=True)
    with pytest.raises(ValueError, match="optim_args are 'a=1', of which optim='adamw_ort_fused' takes none"):
        trainers.ORTTrainingArguments(str(tmp_path), optim="adamw_ort_fused", optim_args="a=1", use_cpu=True)
    args = trainers.ORTTrainingArguments(str(tmp_path), save_onnx=True, use_cpu=True)
    with pytest.raises(ValueError, match="onnx_prefix is empty"):
        trainers.ORTTrainer(gpt2(), args)
    with pytest.raises(ValueError, match=r"memory_budget is 2\.0"):
        trainers.ORTTrainingArguments(str(tmp_path), memory_budget=2.0, use_cpu=True)
    with pytest.raises(ValueError, match="log_level"):
        trainers.ORTTrainingArguments(str(tmp_path), onnx_log_level="loud", use_cpu=True)
