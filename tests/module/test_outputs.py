"""`ORTModule(module, outputs=[...])`: a training step computes and gives what is named, and nothing else."""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ortmodule_c import DebugOptions, ORTModule, ORTModuleError, verify
from wrapped import Function, assert_same_step, close, pair

transformers = pytest.importorskip("transformers")
SequenceClassifierOutput = transformers.modeling_outputs.SequenceClassifierOutput

Pair = namedtuple("Pair", "loss logits")


@dataclass
class Fields:
    loss: Tensor
    logits: Tensor | None = None


# What a forward makes of (loss, logits); what names the loss in it; what the rest becomes.
CONTAINERS: dict[str, tuple[Any, Any, Any]] = {
    "tuple": (lambda loss, logits: (loss, logits), 0, lambda out: (out[0], out[1])),
    "tuple, from its end": (lambda loss, logits: (logits, loss), 1, lambda out: (out[1], out[0])),
    "list": (lambda loss, logits: [loss, logits], 0, lambda out: (out[0], out[1])),
    "dict": (lambda loss, logits: {"loss": loss, 7: logits}, "loss", lambda out: (out["loss"], out[7])),
    "ordered dict": (
        lambda loss, logits: OrderedDict(logits=logits, loss=loss),
        "loss",
        lambda out: (out["loss"], out["logits"]),
    ),
    "named tuple": (Pair, "loss", lambda out: (out.loss, out.logits)),
    "dataclass": (Fields, "loss", lambda out: (out.loss, out.logits)),
    "ModelOutput": (
        lambda loss, logits: SequenceClassifierOutput(loss=loss, logits=logits),
        "loss",
        lambda out: (out.loss, out.logits),
    ),
}


def classifier(make: Any) -> nn.Module:
    def forward(m: nn.Module, x: Tensor, y: Tensor) -> Any:
        logits = m.layer(x)
        return make(F.cross_entropy(logits, y), logits)

    torch.manual_seed(0)
    return Function(forward, layer=nn.Linear(5, 3))


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(4, 5), torch.randint(3, (4,))


@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize("capture", ["export", "dynamo"])
@pytest.mark.parametrize("name", CONTAINERS)
def test_what_is_not_named_is_none(name: str, capture: Any, precision: Any) -> None:
    make, key, read = CONTAINERS[name]
    eager = classifier(make)
    ours = ORTModule(copy.deepcopy(eager), DebugOptions(capture=capture), precision=precision, outputs=[key])
    whole = ORTModule(copy.deepcopy(eager), DebugOptions(capture=capture), precision=precision)
    out, want = ours(*batch()), whole(*batch())
    assert type(out) is type(want)
    loss, others = read(out)
    assert others is None
    assert torch.equal(loss, read(want)[0])
    loss.backward()
    read(want)[0].backward()
    assert torch.equal(ours.layer.weight.grad, whole.layer.weight.grad)
    assert not ours.fallback_report()


def test_a_model_output_has_no_key_of_what_is_not_named() -> None:
    make, *_ = CONTAINERS["ModelOutput"]
    assert [*ORTModule(classifier(make), outputs=["loss"])(*batch())] == ["loss"]


def test_several_may_be_named() -> None:
    module = Function(lambda m, x: (m.layer(x), x + 1, x * 2), layer=nn.Linear(5, 3))
    first, second, third = ORTModule(module, outputs=[0, 2])(torch.randn(2, 5))
    assert second is None
    assert first.shape == (2, 3) and third.shape == (2, 5)


def test_evaluation_gives_all() -> None:
    ours = ORTModule(classifier(Pair), outputs=["loss"])
    assert ours(*batch()).logits is None
    ours.eval()
    assert ours(*batch()).logits.shape == (4, 3)
    ours.train()
    assert ours(*batch()).logits is None


def test_what_is_not_named_is_not_computed() -> None:
    """Nor kept: the arena of a run is smaller by the logits' copy."""

    def forward(m: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = m.first(x)
        return hidden.sum(), m.second(hidden).exp().sum(0)

    module = Function(forward, first=nn.Linear(5, 3), second=nn.Linear(3, 1000))
    x = torch.randn(64, 5)
    part, whole = ORTModule(copy.deepcopy(module), outputs=[0]), ORTModule(module)
    loss, _ = part(x)
    loss.backward()
    assert part.second.weight.grad is None
    whole(x)[0].backward()
    assert part.stats()["live_bytes"] + 64 * 1000 * 4 <= whole.stats()["live_bytes"]


@pytest.mark.parametrize("capture", ["export", "dynamo"])
@pytest.mark.parametrize(
    ("name", "key", "told"),
    [
        (
            "ModelOutput",
            "losses",
            "'losses', but the forward returned a SequenceClassifierOutput with 'loss', 'logits'",
        ),
        ("dict", "logits", "'logits', but the forward returned a dict with 'loss', 7"),
        ("tuple", 2, "2, but the forward returned a tuple with 0, 1"),
        ("tuple", "loss", "'loss', but the forward returned a tuple with 0, 1"),
        ("named tuple", 0, "0, but the forward returned a Pair with 'loss', 'logits'"),
    ],
)
@pytest.mark.filterwarnings("ignore:ortmodule_c")
def test_what_there_is_not_is_told_with_what_there_is(name: str, key: Any, told: str, capture: Any) -> None:
    ours = ORTModule(classifier(CONTAINERS[name][0]), DebugOptions(capture=capture), outputs=[key])
    for _ in range(2):
        with pytest.raises(ORTModuleError, match=f"outputs names {told}"):
            ours(*batch())


@pytest.mark.filterwarnings("ignore:ortmodule_c")
def test_one_tensor_has_no_parts() -> None:
    with pytest.raises(ORTModuleError, match="outputs names 'loss', but the forward returned a Tensor, which has no"):
        ORTModule(nn.Linear(5, 3), outputs=["loss"])(torch.randn(2, 5))


@pytest.mark.filterwarnings("ignore:ortmodule_c")
def test_an_optional_output_may_be_none_beside_another() -> None:
    make, *_ = CONTAINERS["ModelOutput"]
    module = Function(lambda m, x: make(None, m.layer(x)), layer=nn.Linear(5, 3))
    x = torch.randn(2, 5)
    got = ORTModule(module, outputs=["loss", "logits"])(x)
    assert got.loss is None
    close(got.logits, module(x).logits)
    for _ in range(2):
        with pytest.raises(ORTModuleError, match=r"outputs names 'loss', but the forward returned a .* that is None"):
            ORTModule(module, outputs=["loss"])(x)


@pytest.mark.parametrize(
    ("outputs", "error", "told"),
    [
        ("loss", TypeError, "outputs is a str, expected a list of names or indices"),
        (0, TypeError, "outputs is a int, expected a list of names or indices"),
        ([], ValueError, "outputs is empty"),
        ([["loss"]], TypeError, "outputs has a list, expected names or indices"),
    ],
)
def test_others_are_refused(outputs: Any, error: type[Exception], told: str) -> None:
    with pytest.raises(error, match=told):
        ORTModule(nn.Linear(2, 2), outputs=outputs)


@pytest.mark.filterwarnings("ignore:ortmodule_c")
def test_pytorch_gives_no_more() -> None:
    def forward(m: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        m.seen.append(x.sum().item())
        return m.layer(x).sum(), m.layer(x)

    ours = ORTModule(Function(forward, layer=nn.Linear(5, 3), seen=[]), DebugOptions(capture="export"), outputs=[0])
    assert ours(torch.randn(2, 5))[1] is None
    assert ours.fallback_report()


def test_copies_and_verify_take_it_along() -> None:
    ours = ORTModule(classifier(CONTAINERS["dict"][0]), outputs=["loss"])
    for twin in (copy.deepcopy(ours), copy.copy(ours)):
        assert twin(*batch())[7] is None
    found = verify(ours, *batch())
    assert found.ok
    assert [r.name for r in found.rows if r.kind == "output"] == ["output['loss']"]


def test_a_wrapper_can_be_pickled_with_it() -> None:
    ours = ORTModule(transformers.GPT2LMHeadModel(_tiny()), outputs=["loss"])
    twin = pickle.loads(pickle.dumps(ours))
    ids = torch.randint(50, (2, 8))
    assert [*twin(input_ids=ids, labels=ids)] == ["loss"]


def _tiny() -> Any:
    return transformers.GPT2Config(
        n_layer=1,
        n_embd=16,
        n_head=2,
        vocab_size=50,
        n_positions=16,
        use_cache=False,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
        loss_type="ForCausalLM",
    )


@pytest.mark.filterwarnings("ignore:ortmodule_c")
@pytest.mark.parametrize("capture", ["export", "dynamo"])
def test_of_a_language_model_the_graph_gives_the_loss_alone(capture: Any) -> None:
    torch.manual_seed(0)
    eager = transformers.GPT2LMHeadModel(_tiny())
    ours = ORTModule(copy.deepcopy(eager), DebugOptions(capture=capture), outputs=["loss"])
    ids = torch.randint(50, (2, 8))
    want, got = eager(input_ids=ids, labels=ids), ours(input_ids=ids, labels=ids)
    assert [*got] == ["loss"]
    for out in (want, got):
        out.loss.backward()
    torch.testing.assert_close(got.loss, want.loss, rtol=1e-5, atol=1e-6)
    for p, q in zip(eager.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=1e-3, atol=1e-6)


def test_what_is_computed_comes_contiguous() -> None:
    """Of eager's values and gradients, not of its strides."""
    eager, ours = pair(nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last))
    x = torch.randn(2, 3, 8, 8).contiguous(memory_format=torch.channels_last)
    assert eager(x).is_contiguous(memory_format=torch.channels_last)
    assert assert_same_step(eager, ours, x).is_contiguous()
