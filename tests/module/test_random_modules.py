"""Random modules in float64, at two sizes: outputs and gradients equal eager's nearly to the last bit."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wrapped import Function, float_sum, pair

# A row makes a value of others: <x>, <y>, <z> are float ones, <x2> to <x4> of that rank, <i> and <b> an integer and
# a bool one. Any other <word> is filled in from FILL, or by the method of that name.
ROWS = """
<x> <sign> <y>
<x> <sign> <c>
<c> <sign> <x>
<x> <sign> <i>
<x> / (<y>.abs() + 0.5)
(<x>.abs() + 0.1) ** <y>.tanh()
<x> ** <n>
<x>.<unary>()
F.<activation>(<x>)
(<x> * 2).round() / 2
<x>.clamp(<c>, 0.5)
<x>.clamp(min=<y>)
torch.maximum(<x>, <y>)
torch.lerp(<x>, <y>, 0.3)
torch.where(<b>, <x>, <y>)
<x>.masked_fill(<x> <than> <y>, <c>)
<x>.detach()
<x> <than> <y>
<b> | ~<b> & (<x> > 0)
<b> * <x>
(<x> * 3).long()
<i> // 2 + <i> % 3
<x>.double() * <i>.sum()
<x>.<reduction>(<axes>, keepdim=<b_>)
<x>.<reduction>(<axis>)
<x>.<total>()
<x>.<extreme>(<axis>)
<x>.cumsum(<axis>)
<x>.softmax(<axis>)
<x>.log_softmax(<axis>)
torch.var_mean(<x>, <axis>, correction=0)
F.layer_norm(<x>, <x>.shape[-1:], <last>)
F.batch_norm(<x3>, None, None, training=True)
F.group_norm(<x4>, 2, <channels>)
<x2> @ <y2>.T
<x3>.mT @ <x3>
<x> @ <square>
torch.addmm(<y>, <x2>, <y2>.T, beta=0.5)
F.gelu(F.linear(<x>, <square>, <last>))
F.linear(<x>, <square>) + <y>
F.conv2d(<x4>, <filter>, <channels>, <stride>, 1)
F.max_pool2d(<x4>, <pool>)
F.avg_pool2d(<x4>, <pool>)
F.scaled_dot_product_attention(<x3>, <x3>, <x3>, is_causal=<b_>)
F.cross_entropy(<x2>, <x2>.argmin(1))
<x>.reshape(<x>.shape[0], -1)
<x>.reshape(-1, <x>.shape[-1])
<x>.unflatten(<axis>, (2, -1))
<x>.unsqueeze(<axis>)
<x>.squeeze()
<x>.permute(<order>)
<x>.expand(2, *<x>.shape)
<x>.repeat_interleave(2, <axis>)
<x>[<index>]
torch.cat([<x>, <x>[1:], <x> * 2])
torch.stack([<x>, <x>.tanh()], <axis>)
<x>.split([1, <x>.shape[<axis>] - 1], <axis>)
<x>.unbind(<axis>)
<x>.roll(<n>, <axis>)
<x>.flip(<axes>)
F.pad(<x>, (<n>, 1))
<x>.tril(<n>) + <x>.triu()
<x>.gather(<axis>, <x>.argmax(<axis>, keepdim=True))
<x>[<i> % <x>.shape[0]]
<x>[:, torch.tensor([0, -1, 0])]
F.embedding(<i> % 5, <table>)
<x>.scatter_add(<axis>, <x>.argsort(<axis>), <x>)
<x>.clone(); <new>[<index>] += <y>
<x>.clone(); <new>[..., 0] = <y>; <new>.relu_()
<x> * 1; <new>.view(-1)[::2].mul_(2)
<x>.clone(); <new>.unbind(<axis>)[0].add_(1)
<x>.clone(); <new>.mT.add_(<y>)
""".strip().splitlines()
FILL = {
    "sign": ["+", "-", "*"],
    "than": ["<", "<=", ">", "==", "!="],
    "c": ["0", "1", "-1.5", "0.5"],
    "n": ["0", "1", "2", "-1"],
    "b_": ["True", "False"],
    "unary": ["abs", "ceil", "cos", "erf", "exp", "expm1", "neg", "sigmoid", "sign", "sin", "square", "tanh"],
    "activation": ["relu", "gelu", "silu", "elu", "selu", "relu6", "hardswish", "softplus", "mish", "hardtanh"],
    "reduction": ["sum", "mean", "amax", "amin", "logsumexp"],
    "total": ["sum", "mean", "max", "prod", "norm", "argmax"],
    "extreme": ["max", "min", "argmax", "norm", "prod"],
    "stride": ["1", "2", "(2, 1)"],
    "pool": ["2", "3, 1", "3, 2, 1", "(2, 1), 2"],
    "index": ["0", "-1", "1:", ":-1", "::2", "1::2", "..., 0", "..., 1:", "..., ::3", ":, None", ":, -2:", "0:0"],
}
SCOPE = {"torch": torch, "F": F}
WORD = re.compile(r"<(\w+)>")
LARGEST = 30.0  # larger values would be compared more loosely


class Writer:
    """Writes a program one random line at a time; a line is kept if eager can run it at both sizes."""

    def __init__(self, seed: int, n_lines: int) -> None:
        self.rng = random.Random(seed)
        self.lines: list[str] = []
        self.names: list[str] = []
        self.parameters: dict[str, nn.Parameter] = {}
        self.inputs: list[list[Tensor]] = [[], []]
        self.scopes: list[dict[str, Any]] = [{"s": nn.Module()}, {"s": nn.Module()}]
        for k in range(3):
            self.input(f"x{k}")
        while len(self.lines) < n_lines:
            self.line(f"v{len(self.lines)}")
        self.outputs = [*self.names[-3:], *self.rng.sample(self.names, 2)]

    def __str__(self) -> str:
        inputs = [f"# x{k}: {list(x.shape)} strides {x.stride()}" for k, x in enumerate(self.inputs[0])]
        return "\n".join([*inputs, *self.lines, f"results = {', '.join(self.outputs)}"])

    def input(self, name: str) -> None:
        shape = self.rng.choice([(6,), (4, 6), (2, 4, 4), (6, 6), (0, 6), (1,), ()])
        layout, grad, of_halves = self.rng.randrange(4), self.rng.random() < 0.6, self.rng.random() < 0.3
        for i, batch in enumerate((3, 5)):
            x = torch.randn(batch, *shape, dtype=torch.float64)
            x = (x * 2).round() / 2 if of_halves else x  # equal elements
            if layout == 1:
                x = x.transpose(0, -1).contiguous().transpose(0, -1)
            elif layout == 2:
                x = torch.stack([x, x], -1)[..., 1]
            elif layout == 3:
                x = x[:1].expand_as(x)
            self.inputs[i].append(x.requires_grad_(grad))
            self.scopes[i][name] = x
        self.names.append(name)

    def line(self, new: str) -> None:
        row, words = self.rng.choice(ROWS), {"new": new}
        made = dict(self.parameters)
        try:
            for word in WORD.findall(row):
                words[word] = words.get(word) or self.word(word, words)
            line = f"{new} = {WORD.sub(lambda m: words[m[1]], row)}"
            results = [self.result(line, new, scope) for scope in self.scopes]
        except (RuntimeError, IndexError, ValueError, TypeError):
            self.parameters = made
            return
        self.lines.append(line)
        for scope, result in zip(self.scopes, results, strict=True):
            scope[new] = result
        parts = results[0]
        self.names += [new] if isinstance(parts, Tensor) else [f"{new}[{k}]" for k in range(len(parts))]

    @staticmethod
    def result(line: str, new: str, scope: dict[str, Any]) -> Any:
        trial = {name: v.clone() if isinstance(v, Tensor) else v for name, v in scope.items()}
        exec(line, SCOPE, trial)
        for t in [trial[new]] if isinstance(trial[new], Tensor) else trial[new]:
            if t.dim() > 5 or t.numel() > 20000 or not (t.abs() <= LARGEST if t.dtype != torch.bool else t | ~t).all():
                raise ValueError(f"{line} is too large")
        return trial[new]

    def value(self, name: str) -> Tensor:
        return eval(name, dict(self.scopes[0]))

    def word(self, word: str, words: dict[str, str]) -> str:
        if word in FILL:
            return self.rng.choice(FILL[word])
        if word[0] in "xyzib" and word[1:] in ("", "2", "3", "4"):
            return self.pick(word)
        x = next((self.value(words[w]) for w in ("x", "x2", "x3", "x4") if w in words), torch.empty(1))
        rank, channels = x.dim(), x.shape[1] if x.dim() > 1 else 1
        if word == "axis":
            return str(self.rng.randrange(-rank, rank))
        if word == "axes":
            return str(tuple(self.rng.sample(range(rank), self.rng.randint(1, rank))))
        if word == "order":
            return str(tuple(self.rng.sample(range(rank), rank)))
        shapes = {
            "last": x.shape[-1:],
            "square": (*x.shape[-1:], *x.shape[-1:]),
            "channels": (channels,),
            "filter": (channels, channels, *self.rng.choices([1, 2, 3], k=2)),
            "table": (5, 4),
        }
        return self.parameter(*shapes[word])

    def pick(self, word: str) -> str:
        """The name of a value; late ones and those with many dims are picked more often."""
        kind = {"i": torch.int64, "b": torch.bool}.get(word[0], torch.float64)
        fits = [n for n in self.names if self.value(n).dtype == kind and word[1:] in ("", str(self.value(n).dim()))]
        two = [fits[max(self.rng.choices(range(len(fits)), k=2))] for _ in range(2)]
        return max(two, key=lambda name: self.value(name).dim())

    def parameter(self, *shape: int) -> str:
        same = [name for name, p in self.parameters.items() if p.shape == shape]
        name = same[0] if same else f"p{len(self.parameters)}"
        if not same:
            self.parameters[name] = nn.Parameter(torch.randn(shape, dtype=torch.float64) / max(1, *shape) ** 0.5)
            for scope in self.scopes:
                setattr(scope["s"], name, self.parameters[name])
        return f"s.{name}"

    def module(self) -> Function:
        code = compile(str(self), "program", "exec")

        def forward(s: nn.Module, *inputs: Tensor) -> Any:
            scope = {"s": s} | {f"x{k}": x for k, x in enumerate(inputs)}
            exec(code, SCOPE, scope)
            return scope["results"]

        return Function(forward, **self.parameters)


def step(module: nn.Module, inputs: list[Tensor]) -> list[Tensor]:
    """Outputs and gradients, zeros where there is none; not every output is in the loss."""
    own = [x.detach().requires_grad_(x.requires_grad) for x in inputs]
    module.zero_grad()
    outputs = module(*own)
    if any(y.requires_grad for y in outputs[:-1]):
        float_sum(outputs[:-1]).backward()
    leaves = [*own, *module.parameters()]
    return [*outputs, *(torch.zeros_like(t) if t.grad is None else t.grad for t in leaves)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", range(16))
def test_random_module(seed: int) -> None:
    torch.manual_seed(seed)
    program = Writer(seed, 5 + seed % 14)
    eager, ours = pair(program.module())
    for inputs in program.inputs:
        for k, (got, want) in enumerate(zip(step(ours, inputs), step(eager, inputs), strict=True)):
            peak = max([1.0, *want.detach().abs().flatten().tolist()]) if want.is_floating_point() else 0
            torch.testing.assert_close(
                got, want, rtol=1e-9, atol=1e-10 * peak, msg=lambda m, k=k: f"result {k} of\n{program}\n{m}"
            )
