"""Shapes in which every dim is the same: batch == features == sequence == heads.

A rule that goes by counts of elements where it should go by axes, or takes one axis for another, shows only there.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wrapped import Function, pair

# Shapes of x, y, z and w, in which n stands for the one size; what is made of them.
ROWS = """
nn nn n n | (F.linear(x, y, z).sum(1) * w).mean()
nn nn n n | (F.linear(x, y, z).sum(0) * w).mean()
n n n | ((x[:, None] + y[None, :]).sum(1) * z).sum()
n n n | ((x[:, None] * y[None, :]).sum(0) * z).sum()
nn nn | (x.unsqueeze(1).expand(-1, x.shape[0], *x.shape[1:]).sum(0) * y).sum()
nn nn | (x.unsqueeze(0).expand(x.shape[0], *x.shape).sum(1) * y).sum()
nn nn | (x.unsqueeze(0).expand(x.shape[0], *x.shape).mean(1) * y).sum()
nn nn | (x.unsqueeze(0).expand(x.shape[0], *x.shape).amax(1) * y).sum()
nn nn | (x.unsqueeze(0).expand(x.shape[0], *x.shape).prod(1) * y).sum()
nnn nn nnn | ((x + y) * z).sum((0, 1))
nnn nn nnn | ((x + y[:, None]) * z).sum((0, 1))
nn nn | (x.T @ y).T @ x
nnn nnn | (x.transpose(1, 2) @ y).transpose(0, 1) @ x
nn nn n | x @ y + z[:, None]
nn nn n | x @ y + z
nn nn nn | x @ y + z * 2
nn nn n | torch.addmm(z[:, None], x, y, beta=0.5, alpha=2)
nnn nnn nn | torch.baddbmm(z, x, y, beta=0.3, alpha=0.7)
nn n | x @ y + y @ x * (y @ y)
nnnn nn | x @ y
nn nnnn | x @ y
nnn n | x @ y
nnn nnn | torch.einsum('bij,bkj->bik', x, y)
nnnn nnnn | torch.einsum('bhqd,bkhd->bhqk', x, y)
nn nn | torch.einsum('ij,jk,kl->il', x, y, x)
nnn n n | F.layer_norm(x, x.shape[-1:], y, z)
nnn nn nn | F.layer_norm(x, x.shape[-2:], y, z)
nnn n n | (x - x.mean(-1, keepdim=True)) / torch.sqrt(x.var(-1, unbiased=False, keepdim=True) + 1e-05) * y + z
nnn n n | (x - x.mean(1, True)) / torch.sqrt((x - x.mean(1, keepdim=True)).square().mean(1, True) + 1e-5) * y + z
nnn n n | F.layer_norm(x, x.shape[-1:]) * y[:, None] + z[:, None]
nnn nnn | F.layer_norm(x, x.shape[-1:]) * y
nnn n | F.layer_norm(x, x.shape[-1:]) * y[None, :, None]
nnn n | x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-06) * y
nnn n | F.rms_norm(x, x.shape[-1:], y)
nnn | (x - x.max(-1, keepdim=True)[0]).exp() / (x - x.max(-1, keepdim=True)[0]).exp().sum(-1, keepdim=True)
nnn | (x - x.amax(0, keepdim=True)).exp() / (x - x.amax(0, keepdim=True)).exp().sum(0, keepdim=True)
nnn | (x - x.amax(0, keepdim=True)).exp() / (x - x.amax(0, keepdim=True)).exp().sum(1, keepdim=True)
nn | (x - x.amax(0)).exp() / (x - x.amax(0)).exp().sum(0)
nn | (x - x.amax(1)).exp() / (x - x.amax(1)).exp().sum(1)
nnnn nnnn nnnn | (x @ y.transpose(-1, -2) / 2).softmax(-1) @ z
nnnn nnnn nnnn | (x @ y.transpose(-1, -2) / 2).softmax(-2) @ z
nnnn nnnn nnnn | (x @ y / 2).softmax(-1) @ z
nnnn nnnn nnnn nn | (x @ y.transpose(-1, -2) / 2 + w[:, None, None, :]).softmax(-1) @ z
nnnn nnnn nnnn nn | (x @ y.transpose(-1, -2) / 2 + w[:, None, :, None]).softmax(-1) @ z
nnnn nnnn nnnn n | (x @ y.transpose(-1, -2) / 2 + w[None, :, None, None]).softmax(-1) @ z
nnnn nnnn nnnn | (x @ y.transpose(-1, -2) / 2).softmax(-1) @ z.transpose(-1, -2)
nnnn nnnn nnnn | F.scaled_dot_product_attention(x, y, z)
nnnn nnnn nnnn | F.scaled_dot_product_attention(x, y, z, is_causal=True)
nnnn nnnn nnnn nn | F.scaled_dot_product_attention(x, y, z, attn_mask=w.detach())
nnnn nnnn nnnn nnn | F.scaled_dot_product_attention(x, y, z, attn_mask=w.detach())
nnnn nnnn nnnn n1nn | F.scaled_dot_product_attention(x, y, z, attn_mask=w.detach() > 0)
nnnn nnnn nnnn nn | F.scaled_dot_product_attention(x, y, z, attn_mask=w)
nnn nnn nnn nnn | F.scaled_dot_product_attention(x, y, z, attn_mask=w.detach())
nnn nnn nnn nn | F.scaled_dot_product_attention(x, y, z, attn_mask=w.detach())
3nnn n n | F.batch_norm(x, None, None, y, z, True)
3n n n | F.batch_norm(x, None, None, y, z, True)
nnnn n n | F.instance_norm(x, None, None, y, z, True) if x[0, 0].numel() > 1 else x.sum()
nnnn n n | F.group_norm(torch.cat([x, x * 2], 3), x.shape[1], y, z)
nnnn n n | F.group_norm(torch.cat([x, x * 2], 3), 1, y, z)
nnnn nn11 n | F.conv2d(x, y, z)
nnnn nnnn n | F.conv2d(x, y, z, padding=1)
nn44 n133 n | F.conv2d(x, y, z, padding=1, groups=x.shape[1])
nn7 nn3 n | F.conv1d(x, y, z, padding=2, dilation=2, stride=2)
nnnn nnnn n | F.conv2d(F.pad(x, (0, 1, 2, 0)), y, z, padding=1)
nn7 nn3 n | F.conv1d(F.pad(x, (2, 1)), y, z, stride=2)
nn44 nn22 n | F.conv_transpose2d(x, y, z, stride=2, padding=1, output_padding=1)
nnnn nnnn n | F.conv_transpose2d(x, y, z)
nn44 n133 n | F.conv_transpose2d(x, y, z, padding=1, groups=x.shape[1])
nn7 nn3 n | F.conv_transpose1d(x, y, z, padding=2, dilation=2, stride=2)
nnnnn nnnnn n | F.conv_transpose3d(x, y, z)
nnnnn nn111 n | F.conv3d(x, y, z)
nnnnn nnnnn n | F.conv3d(x, y, z, padding=1)
nnnn nn11 n | F.conv2d(x, y, z).sum((2, 3))
nnnn nn11 n | F.conv2d(x, y) + z
nnnn nn11 n | F.conv2d(x, y) + z[:, None, None]
nn | F.cross_entropy(x, torch.arange(x.shape[0]) % x.shape[1], label_smoothing=0.1)
nn nn | F.cross_entropy(x, y.softmax(-1))
nnn | F.cross_entropy(x, torch.arange(x.shape[0] * x.shape[2]).reshape(x.shape[0], x.shape[2]) % x.shape[1])
nn n | F.cross_entropy(x, torch.arange(x.shape[0]) % x.shape[1], weight=y.detach().abs())
nn | F.nll_loss(x.log_softmax(1), torch.arange(x.shape[0]) % x.shape[1], reduction='none')
nn n | F.mse_loss(x, y.expand(x.shape))
nn nn | F.huber_loss(x, y, delta=0.3)
nn nn | F.kl_div(x.log_softmax(-1), y.softmax(-1), reduction='batchmean')
nn nn n | F.binary_cross_entropy_with_logits(x, y.sigmoid().detach(), pos_weight=z.detach().abs())
nn n | (x.var(1) * y + x.std(0)).sum()
nn n | x.norm(dim=1) * y + x.norm(p=1, dim=0) + x.norm(p=3, dim=0)
nn n | x.logsumexp(1) * y + x.logsumexp(0)
nn n | x.cumsum(0) * y + x.cumsum(1)
nn | x.gather(1, torch.arange(x.numel()).reshape(x.shape) % x.shape[1])
nn | x[torch.arange(x.shape[0]), torch.arange(x.shape[0])]
nnn | x[:, torch.arange(x.shape[0])][torch.arange(x.shape[0])]
nn | x[-1] + x[..., -1] + x[:, -1:].squeeze(1)
nn | F.embedding(torch.arange(x.numel()).reshape(x.shape) % x.shape[0], x, padding_idx=0)
nn nn n | torch.where(x > y, x * z, y / z[:, None])
nn nn | torch.maximum(x, y) * torch.minimum(x, y[0])
nnn n | x.permute(2, 0, 1) * y + x.permute(1, 2, 0)
nnn n | x.reshape(x.shape[0], -1).reshape(x.shape).transpose(0, 2).reshape(x.shape) * y
nnn | torch.cat(x.chunk(2, 0)[::-1], 0)
nn nn | torch.stack([x, y, x * y], 1).sum(2)
nnnn nn | torch.cat([-x[..., x.shape[-1] // 2:], x[..., :x.shape[-1] // 2]], -1) * y + x * y
nn n | x.tril() * y + x.triu(1)
nn n | F.pad(x * y, (1, 2, 0, 1))
nn n | 0.5 * (x * y) * (1 + torch.tanh(0.7978845608028654 * (x * y + 0.044715 * (x * y) ** 3)))
nn n | x * y * torch.sigmoid(x * y)
nn nn nn nn | F.silu(x @ y) * (x @ z) @ w
nnnn | F.avg_pool2d(x, 3, 1, 1) + F.adaptive_avg_pool2d(x, 1)
nnnn | F.max_pool2d(x, 3, 1, 1)
nnnnn | F.avg_pool3d(x, 1, 2) + F.adaptive_avg_pool3d(x, 1)
nnnnn | F.max_pool3d(x, 3, 1, 1)
nn n | F.normalize(x, dim=0) * y + F.normalize(x, dim=1)
nn n | F.glu(torch.cat([x, x * y], -1))
nnn n | F.prelu(x, y)
nn n | ((x - x.mean(0)) * y - (x - x.mean(1))).pow(2).sum(0)
nn n | (x / (y.abs() + 1)[:, None]).sum(0) / (y.abs() + 2)
nn n | (x.abs() + 0.1) ** y + (y.abs() + 0.1) ** x
nn n | x.roll(1, 0) * y + x.flip(1)
n n | torch.outer(x, y) @ torch.outer(y, x)
nnn nnn | torch.tensordot(x, y, dims=([0, 2], [2, 0]))
nn nn | torch.kron(x, y)
nn nn n | torch.addcmul(z, x, y, value=0.3) + torch.addcdiv(z, x, y.abs() + 1, value=0.2) + torch.lerp(x, y, z)
nn n | torch.cat([t * (i + 1) for i, t in enumerate(x.split(1, 1))], 1) * y
"""
NAMES = {"torch": torch, "F": F}


def step(module: nn.Module, operands: list[Tensor]) -> list[Tensor | None]:
    """The result and the gradients of the operands."""
    leaves = [t.clone().requires_grad_() for t in operands]
    out = module(*leaves)
    direction = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(7))
    return [out.detach(), *torch.autograd.grad(out, leaves, direction, allow_unused=True)]


@pytest.mark.parametrize("row", ROWS.strip().splitlines())
def test_dims_that_coincide(row: str) -> None:
    shapes, expression = row.split("|", 1)
    function = eval(f"lambda _, {', '.join('xyzw'[: len(shapes.split())])}: {expression}", NAMES)
    eager, ours = pair(Function(function))
    for n in (3, 2, 1):
        generator = torch.Generator().manual_seed(n)
        operands = [
            torch.randn([n if c == "n" else int(c) for c in word], dtype=torch.float64, generator=generator)
            for word in shapes.split()
        ]
        for got, want in zip(step(ours, operands), step(eager, operands), strict=True):
            assert (got is None) == (want is None)
            if got is not None:
                torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-10, equal_nan=True)
