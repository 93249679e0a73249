"""The lines that random programs are made of.

In a line <x>, <y>, <z> are values of floating point, <i> and <b> integer and bool ones, <a> is any; <x2> to <x4> are
of that rank. Any other <word> is one of WORDS, or `grow.py` makes it. A line that begins with <new> makes a value or
several, any other is a statement.
"""

from __future__ import annotations

COMPUTE = """
<new> = <x> <sign> <y>
<new> = <x> <sign> <c>
<new> = <c> <sign> <x>
<new> = <x> <sign> <i>
<new> = <x> / (<y>.abs() + 0.5)
<new> = (<x>.abs() + 0.1) ** <y>.tanh()
<new> = <x> ** <n>
<new> = <x>.<unary>()
<new> = F.<activation>(<x>)
<new> = (<x> * 2).round() / 2
<new> = <x>.clamp(<c>, 0.5)
<new> = <x>.clamp(min=<y>)
<new> = torch.maximum(<x>, <y>)
<new> = torch.lerp(<x>, <y>, 0.3)
<new> = torch.where(<b>, <x>, <y>)
<new> = <x>.masked_fill(<x> <than> <y>, <c>)
<new> = <x> <than> <y>
<new> = <b> | ~<b> & (<x> > 0)
<new> = <b> * <x>
<new> = <i> // 2 + <i> % 3
<new> = <i> + <i>.sum()
<new> = <x> * <i>.sum()
<new> = <x>.<reduction>(<axes>, keepdim=<b_>)
<new> = <x>.<reduction>(<axis>)
<new> = <x>.<total>()
<new> = <x>.<extreme>(<axis>)
<new> = <x>.cumsum(<axis>)
<new> = <x>.softmax(<axis>)
<new> = <x>.log_softmax(<axis>)
<new> = torch.var_mean(<x>, <axis>, correction=0)
<new> = F.layer_norm(<x>, <x>.shape[-1:], <last>)
<new> = F.batch_norm(<x3>, None, None, training=True)
<new> = F.group_norm(<x4>, 2, <channels>)
<new> = <x2> @ <y2>.T
<new> = <x3>.mT @ <x3>
<new> = <x> @ <square>
<new> = torch.addmm(<y>, <x2>, <y2>.T, beta=0.5)
<new> = F.gelu(F.linear(<x>, <square>, <last>))
<new> = F.linear(<x>, <square>) + <y>
<new> = F.conv2d(<x4>, <filter>, <channels>, <stride>, 1)
<new> = F.max_pool2d(<x4>, <pool>)
<new> = F.avg_pool2d(<x4>, <pool>)
<new> = F.scaled_dot_product_attention(<x3>, <x3>, <x3>, is_causal=<b_>)
<new> = F.cross_entropy(<x2>, <x2>.argmin(1))
<new> = F.mse_loss(<x>, <y>)
<new> = F.dropout(<x>, 0.0, s.training)
<new> = F.dropout(<x>, 0.5, False)
<new> = <x>.repeat_interleave(2, <axis>)
<new> = torch.cat([<x>, <x>[1:], <x> * 2])
<new> = torch.cat([<x>, <y>], <axis>)
<new> = torch.stack([<x>, <x>.tanh()], <axis>)
<new> = <x>.roll(<n>, <axis>)
<new> = <x>.flip(<axes>)
<new> = F.pad(<x>, (<n>, 1))
<new> = <x>.tril(<n>) + <x>.triu()
<new> = <x>.gather(<axis>, <x>.argmax(<axis>, keepdim=True))
<new> = <x>[<i> % <x>.shape[0]]
<new> = <x>[:, torch.tensor([0, -1, 0])]
<new> = F.embedding(<i> % 5, <table>)
<new> = <x>.scatter_add(<axis>, <x>.argsort(dim=<axis>, stable=True), <x>)
<new> = <x>.sort(dim=<axis>, stable=True)
<new> = <x>.detach().topk(1, <axis>).values
<new> = <x>.index_select(<axis>, torch.tensor([0, 0]))
<new> = <x> * (2 if s.training else 3)
<new> = <x> + 1 if <x>.shape[0] > 2 else <x>
<new> = <x> / <x>.numel()
<new> = <x> + torch.arange(<x>.shape[<axis>], dtype=torch.float64)
<new> = <x>.new_zeros(<x>.shape) + <y>
<new> = torch.zeros_like(<x>)
<new> = torch.ones(<x>.shape, dtype=torch.float64)
<new> = torch.utils.checkpoint.checkpoint(torch.tanh, <x>, use_reentrant=False)
<new> = <x> + <p>
<new> = <x> * <p>
<new> = <p> * 2
""".strip().splitlines()
VIEWS = """
<new> = <a>.transpose(<axis>, <axis2>)
<new> = <a>.mT
<new> = <a>[<index>]
<new> = <a>[<index>]
<new> = <a>.select(<axis>, 0)
<new> = <a>.narrow(<axis>, 0, 1)
<new> = <a>.expand(2, *<a>.shape)
<new> = <a>.expand(2, *<a>.shape).sum(<axis>)
<new> = <a>.expand_as(<x>)
<new> = <x>.unsqueeze(<axis>) + <y>
<new> = <a>.unsqueeze(<axis>)
<new> = <a>.squeeze()
<new> = <a>.squeeze(<axis>)
<new> = <a>.flatten()
<new> = <a>.flatten(0, 1)
<new> = <a>.diagonal()
<new> = <a>.diagonal(<n>, <axis>, <axis2>)
<new> = <a>.unfold(<axis>, <n>, 1)
<new> = <a>.chunk(2, <axis>)
<new> = <a>.split(1, <axis>)
<new> = <a>.unbind(<axis>)
<new> = <x>.split([1, <x>.shape[<axis>] - 1], <axis>)
<new> = <a>.view(-1)
<new> = <a>.view(<a>.shape[0], -1)
<new> = <a>.view(<a>.shape)
<new> = <a>.reshape(-1)
<new> = <a>.reshape(-1, <a>.shape[-1])
<new> = <a>.unflatten(<axis>, (-1, 1))
<new> = <x>.unflatten(<axis>, (2, -1))
<new> = <a>.permute(<order>)
<new> = <a>.movedim(<axis>, 0)
<new> = <a>.T
<new> = <a>.detach()
<new> = <a>.clone()
<new> = <a>.contiguous()
<new> = <a>.view_as(<a>)
<new> = <a>.swapaxes(<axis>, <axis2>)
<new> = <a>.flip(<axis>)
<new> = torch.broadcast_tensors(<x>, <y>)
<new> = <a>
""".strip().splitlines()
IN_PLACE = """
<x>.add_(<y>)
<x>.mul_(<c>)
<x>.mul_(<y>)
<x>.sub_(<y>, alpha=2)
<x>.div_(2)
<x>.neg_()
<a>.zero_()
<x>.fill_(<c>)
<a>.copy_(<y>)
<x>.copy_(<a>)
<x>.clamp_(-0.5, 0.5)
<x>.relu_()
<x>.tanh_()
<x>.masked_fill_(<b>, <c>)
<x>.masked_fill_(<x> <than> 0, <c>)
<x>[<b>] = <c>
<x>[<x> <than> <c>] = <c>
<x>[<index>] = <c>
<x>[<index>] = <y>
<x>[<index>] += <y>
<x>[<index>] *= 2
<x>[<i> % <x>.shape[0]] = <c>
<x>[[0, -1]] = <y>
<x> += <y>
<x> *= <c>
<x> -= <y>
<i> += 1
<i>[<index>] = 2
<b>[<index>] = True
<x>.index_put_((<i> % <x>.shape[0],), <y>, accumulate=True)
<x>.index_add_(<axis>, torch.tensor([0, 0]), <y>)
<x>.index_fill_(<axis>, torch.tensor([0]), <c>)
<x>.index_copy_(<axis>, torch.tensor([0]), <y>)
<x>.scatter_(<axis>, <x>.argsort(dim=<axis>, stable=True), <x>.clone())
<x>.lerp_(<y>, 0.5)
<x>.addcmul_(<y>, <z>)
<x>.add_(<i>)
<x>.round_()
<x>.cumsum_(<axis>)
<x>.tril_()
<x>.fill_diagonal_(<c>)
<x>.view(-1)[::2].mul_(2)
<x>.unbind(<axis>)[0].add_(1)
<x>.mT.add_(<y>)
<x>.detach().clamp_(0, 1)
<x>.diagonal().zero_()
<x>.select(<axis>, 0).copy_(<y>)
F.relu(<x>, inplace=True)
F.dropout(<x>, 0.0, True, inplace=True)
<new> = <x>.clone(); <new>[<index>] += <y>
<new> = <x>.clone(); <new>[..., 0] = <y>; <new>.relu_()
<new> = <x> * 1; <new>.view(-1)[::2].mul_(2)
<new> = <x>.clone(); <new>.unbind(<axis>)[0].add_(1)
<new> = <x>.clone(); <new>.mT.add_(<y>)
<new> = <x>.add_(<y>)
<new> = <x>.mul_(<c>).view(-1)
<new> = torch.zeros_like(<x>).copy_(<y>)
<new> = torch.zeros(<x>.shape, dtype=torch.float64); <new>[<index>] = <y>
<new> = <x>.relu_()
""".strip().splitlines()
CASTS = """
<new> = <x>.float()
<new> = <x>.double()
<new> = <a>.double()
<new> = <x>.float().double()
<new> = (<x> * 3).long()
<new> = <x>.int()
<new> = <x>.bool()
<new> = <a>.to(torch.float64)
<new> = <a>.to(<x>.dtype)
<new> = <a>.type_as(<x>)
<new> = <b>.double() - 0.5
<new> = <b>.long()
<new> = <i> * <b>
<new> = <i> / 2
<new> = <x>.to(torch.float32) + <y>
<new> = (<x> / <y>.abs().clamp(min=0.5)).float().long()
<new> = <x>.sum(dtype=torch.float32)
""".strip().splitlines()
STATE = """
s.<count> += 1
s.<count> = s.<count> + 1
s.<buffer>.add_(<c>)
s.<buffer>.mul_(0.9).add_(<x>.detach(), alpha=0.1)
s.<buffer>.copy_(<x>)
s.<buffer>.copy_(<x>.detach().mean())
s.<buffer> = s.<buffer> * 0.5 + 1
s.<buffer> = <x>.detach()
s.<buffer> = s.<buffer> + <x>.detach().sum()
s.<buffer>[<index>] = <x>.detach().sum()
s.<buffer>[0] = s.<count>
s.<buffer>.lerp_(<x>.detach(), 0.1)
s.<buffer>, s.<count> = s.<buffer> + 1, s.<count> * 2
<new> = <x> + s.<buffer>
<new> = <x> * s.<count>
<new> = s.<buffer>.clone()
<new> = s.<buffer>
<new> = s.<buffer> * <p>
<new> = <p>.clone()
<new> = <p>.detach()
<new> = <p>
<new> = F.batch_norm(<x2>, s.<mean>, s.<var>, training=s.training)
""".strip().splitlines()
# What mostly runs whole in PyTorch.
REFUSED = """
<x>[<x> <than> <c>] += 1
<new> = Raised.apply(<x>)
<new> = Raised.apply(<x> * 1)
<new> = <a>.data
<x>.data.mul_(2)
<x>.requires_grad_()
<x>.detach_()
torch._foreach_add_([<x>, <y>], 1)
torch.add(<x>, <y>, out=<z>)
<new> = <x>[<b>]
<x>.t_()
<x>.transpose_(<axis>, <axis2>)
<x>.unsqueeze_(<axis>)
<x>.squeeze_()
<new> = <x> if <x>.sum() > 0 else -<x>
""".strip().splitlines()
CUSTOM = """
<new> = Doubled.apply(<x>)
<new> = Swapped.apply(<x>, <y>)
""".strip().splitlines()

# How often a line of each kind is tried, at most; every program draws weights of its own below these.
KINDS = [(COMPUTE, 4), (VIEWS, 3), (IN_PLACE, 4), (CASTS, 1), (STATE, 1), (CUSTOM, 0.3), (REFUSED, 0.15)]

WORDS = {
    "sign": ["+", "-", "*"],
    "than": ["<", "<=", ">", "==", "!="],
    "c": ["0", "1", "-1.5", "0.5"],
    "n": ["0", "1", "2", "-1"],
    "b_": ["True", "False"],
    "unary": ["abs", "ceil", "cos", "erf", "exp", "expm1", "neg", "sigmoid", "sign", "sin", "square", "tanh", "floor"],
    "activation": ["relu", "gelu", "silu", "elu", "selu", "relu6", "hardswish", "softplus", "mish", "hardtanh"],
    "reduction": ["sum", "mean", "amax", "amin", "logsumexp"],
    "total": ["sum", "mean", "max", "min", "prod", "norm", "argmax"],
    "extreme": ["max", "min", "argmax", "norm", "prod", "all", "any"],
    "stride": ["1", "2", "(2, 1)"],
    "pool": ["2", "3, 1", "3, 2, 1", "(2, 1), 2"],
    "index": ["0", "-1", "1:", ":-1", "::2", "1::2", "..., 0", "..., 1:", ":, None", "None", "...", ":, -1:", "0:0"],
}
# Contexts a run of lines may stand in, and how often.
WITHIN = {
    "": 12,
    "torch.no_grad()": 2,
    "torch.enable_grad()": 0.2,
    "torch.set_grad_enabled(s.training)": 0.3,
    "torch.no_grad(), torch.enable_grad()": 0.2,
}
