"""The trainers under Optimum's names, beside those of transformers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

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


def test_only_the_loss_is_computed_unless_more_is_read(tmp_path: Path) -> None:
    seen: list[Any] = []

    class Reading(trainers.ORTTrainer):  # type: ignore[name-defined, misc]
        def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
            outputs = model(**inputs)
            seen.append(outputs.logits)
            return (outputs.loss, outputs) if return_outputs else outputs.loss

    def loss_func(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        seen.append(outputs["logits"])
        return outputs["logits"].float().logsumexp(-1).mean() + 0 * labels.sum()

    ids = torch.randint(64, (2, 12))
    for kind, more, is_given in [
        (trainers.ORTTrainer, {}, False),
        (Reading, {}, True),
        (trainers.ORTTrainer, {"compute_loss_func": loss_func}, True),
    ]:
        args = trainers.ORTTrainingArguments(**settings(tmp_path))
        trainer = kind(gpt2(), args, train_dataset=Texts(), eval_dataset=Texts(), **more)
        outputs = trainer.model.train()(input_ids=ids, labels=ids)
        assert (outputs.logits is not None) == is_given
        assert trainer.model.eval()(input_ids=ids, labels=ids).logits is not None
        trainer.train()
    assert len(seen) >= 8 and all(isinstance(logits, Tensor) for logits in seen)


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
    assert again.optim is args.optim
    assert trainers.ORTSeq2SeqTrainingArguments(str(tmp_path), predict_with_generate=True, use_cpu=True).optim


def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="adamw_ort is not a valid OptimizerNames"):
        trainers.ORTTrainingArguments(str(tmp_path), optim="adamw_ort", use_cpu=True)
    with pytest.raises(ValueError, match="optim_args are 'a=1', of which optim='adamw_ort_fused' takes none"):
        trainers.ORTTrainingArguments(str(tmp_path), optim="adamw_ort_fused", optim_args="a=1", use_cpu=True)
    args = trainers.ORTTrainingArguments(str(tmp_path), save_onnx=True, use_cpu=True)
    with pytest.raises(ValueError, match="onnx_prefix is empty"):
        trainers.ORTTrainer(gpt2(), args)
    args = trainers.ORTTrainingArguments(str(tmp_path), memory_budget=2.0, use_cpu=True)
    with pytest.raises(ValueError, match=r"memory_budget is 2\.0"):
        trainers.ORTTrainer(gpt2(), args)
