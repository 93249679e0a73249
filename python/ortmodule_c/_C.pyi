"""Types of the C extension."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor
from torch.nn import Module

from .onnx.description import Raw

__version__: str

class DeviceError(RuntimeError):
    """A device failed, or a kernel found what it was given to be wrong; told when it is known.

    That may be at a later step than the one which it is of, whose op is named where it is known.
    """

class ConsumedError(RuntimeError):
    """Backward was asked for a state that an earlier backward has used up."""

class Callbacks(Protocol):
    """Python side of ops without a kernel. A type is a pair such as ``("f32", (2, 3))``."""

    def infer(self, index: int, types: list[tuple[str, tuple[int, ...]]]) -> list[tuple[str, tuple[int, ...]]]: ...
    def forward(self, index: int, inputs: list[Tensor]) -> tuple[list[Tensor], object]: ...
    def backward(self, index: int, state: object, grads: list[Tensor | None]) -> list[Tensor | None]: ...

class Run:
    """What a forward left for backward."""

    def pack(self) -> Tensor:
        """Move the bytes that backward needs into a tensor, at most once; each backward needs it then."""

class Backward:
    """A backward that has begun, and computes as far as it is asked for gradients; it ends when it dies."""

    def take(self, inputs: Sequence[int]) -> list[Tensor | None]:
        """Gradients of these inputs, each of which can be taken once; computed, if they are not yet, with all before.

        From then on nothing reads or writes them, nor the inputs themselves.
        """

    def end(self) -> None:
        """Compute no more; the run is as after any backward."""

class Plan:
    """Everything decided for one signature. Immutable."""

    reads_inputs: tuple[tuple[int, ...], ...]  # by backward
    reads_outputs: tuple[tuple[int, ...], ...]
    in_grads: tuple[bool, ...]
    out_grads: tuple[tuple[bool, ...], ...]
    random: bool
    arena_bytes: int
    lent_bytes: int
    live_bytes: int
    bound_bytes: int
    forward_bytes: int
    n_steps: int
    n_forward: int

    def forward(self, inputs: Sequence[Tensor], seed: int) -> tuple[list[Tensor], Run | None]:
        """Run forward.

        The second result holds what backward needs and lets go of it when it dies. None if the plan has no
        backward.
        """

    def begin(
        self,
        run: Run,
        inputs: Sequence[Tensor | None],
        outputs: Sequence[Tensor | None],
        grads: Sequence[Tensor | None],
        keep: bool = False,
        packed: Tensor | None = None,
        needed: bytes | None = None,
    ) -> Backward:
        """Begin a backward as :meth:`backward` runs it."""

    def uses(self, backward: int) -> tuple[list[int], list[int], list[int], list[int]]:
        """Before which step a backward has used for the last time, if at all.

        Returns
        -------
        inputs
            What it reads of each input.
        gradients
            Each input or its gradient, or memory lent for that.
        outputs, output_gradients
            Each output, and its gradient.
        """

    def backward(
        self,
        run: Run,
        inputs: Sequence[Tensor | None],
        outputs: Sequence[Tensor | None],
        grads: Sequence[Tensor | None],
        keep: bool = False,
        packed: Tensor | None = None,
        needed: bytes | None = None,
    ) -> list[Tensor | None]:
        """Run the backward for the given gradients of outputs, None where none is given.

        With `keep` another one may follow. `packed` is what `Run.pack` gave, or a copy of it. The result is
        one gradient per input, None where there is none. With `needed`, which that method gives, no more is computed
        (but on a GPU): other gradients are memory that nothing has been written to.
        """

    def needed(self, backward: int, inputs: Sequence[int]) -> tuple[bytes, tuple[int, ...], tuple[int, ...]]:
        """What a backward computes for the gradients of these inputs, and the inputs and outputs that it then reads."""

    def empty_like(self, tensor: Tensor) -> Tensor:
        """A tensor of that one's type, of unset elements, in the provider's pooled memory."""

    def text(self) -> str: ...
    def describe(self) -> Raw:
        """The planned graph."""

    def profile(self) -> list[tuple[str, str, str, int, float, float, float]]:
        """(phase, op, source name, runs, seconds of them all, flops, bytes moved) of every step (OMC_PROFILE=1)."""

class Session:
    """One template graph and its plans."""

    def __init__(
        self,
        text: str,
        constants: Mapping[str, Tensor],
        callbacks: Callbacks | None = None,
        max_plans: int = 16,
        provider: str = "cpu",
        memory_share: float = 1.0,
        memory_bytes: int | None = None,
    ) -> None:
        """Arenas of plans may have this share of the bytes that they would, and these bytes, if that is possible."""

    def plan(
        self,
        inputs: Sequence[Tensor],
        in_grads: Sequence[bool],
        *out_grads: Sequence[bool],
        retain_graph: bool = False,
        plain: bool = False,
    ) -> Plan:
        """Look up or build the plan for these inputs, dense tensors on the provider's device.

        It has a backward for each of `out_grads`, which say the outputs whose gradient is given. With
        `retain_graph` the state of a forward serves any number of them, else one. A `plain` plan runs the graph
        as it was written, without any rewrite: what others are compared with.
        """

    def stats(self) -> dict[str, float]: ...
    n_inputs: int
    n_outputs: int

class Fingerprint:
    """What a walk over a module found, but for its tensors. Hashable, compared by value."""

    hooked: str | None
    opaque: str | None
    detached: str | None
    renewed: str | None

class Held:
    """Dictionaries and other places of Python, and what was there.

    A dict comes with the object that has it, or None, its keys and their values, `missing` for those that do not
    count. A place is a holder, a key and the value there: an item of a dict, an attribute, or what calling the
    holder gives where the key is None; `missing` stands for no value. Builtin plain values, lists, tuples, dicts and
    instances of `by_value` are compared by value and type, -0.0 and NaN as they are written, those of `by_repr` by
    how they are written; all else by identity.
    """

    def __init__(
        self,
        dicts: tuple[tuple[object, dict[str, object], tuple[object, ...], tuple[object, ...]], ...],
        places: tuple[tuple[object, object, object], ...],
        by_value: frozenset[type],
        by_repr: frozenset[type],
        missing: object,
    ) -> None: ...
    def first_changed(self, start: int) -> int:
        """Index of the first of the dicts, `start` or later, then of the places, that is not what it was, or -1."""

def scan(
    module: Module, last: Fingerprint | None = None, held: Held | None = None
) -> tuple[list[Tensor], list[Tensor], Fingerprint, int]:
    """Parameters and buffers of a module, each once, and the rest of what a graph assumes of it.

    Where nothing has changed since `last` was found the fingerprint is `last` itself. The number is of the first dicts
    of `held` that were compared on the way and are what they were.
    """

def transform(
    text: str,
    stage: str,
    types: Sequence[str] | None = None,
    out_grads: Sequence[bool] | None = None,
    in_grads: Sequence[bool] | None = None,
    constants: Mapping[str, Tensor] | None = None,
    callbacks: Callbacks | None = None,
) -> str:
    """Parse, apply one stage and print: for tests and DebugOptions. `callbacks` tells the types of TorchCall nodes.

    Stages: "parse", "specialize" (to ``types``, e.g. ``["f32[2,3]"]``), "fold", "canonicalize", "cse",
    "differentiate", "fuse", "rule:NAME".
    """

def infer(
    op: str,
    types: Sequence[tuple[str, tuple[int, ...]] | None],
    attributes: Mapping[str, float | str | Sequence[float] | Sequence[str]] | None = None,
    constants: Mapping[int, Tensor] | None = None,
    outputs: int | None = None,
    provider: str = "cpu",
) -> list[tuple[str, tuple[int, ...]]]:
    """Types that a node would give, by the shape rule and the kernels that sessions on the provider use.

    Sizes are numbers: kernels and shape rules know no others. Who has open ones asks with an example of each, as
    a session is asked with those of one call: equal where they are known to be equal, and such as may come. Of
    two answers, for examples that differ in all open sizes, those dims stand fast that agree.

    Parameters
    ----------
    op
        Its name.
    types
        Of each input, such as ``("f32", (2, 3))``; None for one left out.
    attributes
        Numbers, strings and lists of them.
    constants
        Elements of inputs, by their index, where they are known. A shape rule that reads an input needs them.
    outputs
        How many there are; by default as many as the op may have, or one if that is any number.
    provider
        Whose kernels are asked for.

    Raises
    ------
    NotImplementedError
        There is no such op, or no kernel for this node, or an input that sets a shape is not known.
    TypeError
        The dtypes do not fit the op or one another; or an argument of this function is of the wrong type.
    ValueError
        The shapes do not fit, or there are too many or too few inputs, or an attribute is wrong.
    """

def describe(
    text: str,
    stage: str,
    types: Sequence[str] | None = None,
    out_grads: Sequence[bool] | None = None,
    in_grads: Sequence[bool] | None = None,
    constants: Mapping[str, Tensor] | None = None,
    callbacks: Callbacks | None = None,
) -> Raw:
    """As :func:`transform`, but gives plain objects."""

def rules() -> dict[str, str]:
    """Every rewrite rule and what it claims: "exact", "finite", "sums" or "layer", see csrc/passes/rewrite.h."""

def ops() -> dict[str, tuple[str, bool, bool]]:
    """Every op: family, whether it is ONNX's own, whether it has a gradient rule."""

def attributes(op: str) -> dict[str, tuple[str, float | str | None, bool]]:
    """Attributes of an op: kind, default and whether one is required. A list's default is that of its elements."""

def isas() -> list[str]:
    """Instruction sets this machine can run, e.g. ``["base", "avx2"]``."""

def set_isa(name: str | None) -> None:
    """Bound the instruction set of kernels picked from now on (tests)."""

Row = tuple[int, Tensor | None, Tensor, Tensor | None, Tensor | None, bool, tuple[Tensor, ...]]

def optim_rows(
    state: dict[Tensor, dict[str, Any]],
    groups: list[tuple[list[Tensor], tuple[str, ...], bool, bool]],
    counts: bool,
    writes_grad: bool,
    provider: str,
) -> tuple[list[Row], list[Tensor]] | None:
    """`tensors` of `optim_step`, and what it writes of them; None unless all is there and as the core takes it.

    Parameters
    ----------
    state
        Of an optimizer, where tensors of a parameter lie by name.
    groups
        Parameters, names of their states, whether those of 16 bits have states of 32, and whether they have a
        "master"; those without a gradient are left out.
    counts
        Whether parameters have a "step".
    writes_grad
        Whether gradients are written.
    provider
        Where all tensors have to be.
    """

def optim_step(
    rule: str,
    tensors: Sequence[Row],
    groups: Sequence[Mapping[str, float | Tensor]],
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    norm: Tensor | None = None,
    seed: int = 0,
    provider: str = "cpu",
) -> None:
    """Take a step of an optimizer over contiguous tensors; csrc/optim/optim.h says what it computes.

    Parameters
    ----------
    rule
        Of csrc/optim/rules.def, such as ``"adam"``.
    tensors
        Of each: index of its group, parameter, gradient, master, step, whether its states have no values yet, states.
    groups
        Numbers by the names of csrc/optim/numbers.def; "lr" may be a float64 of the device's.
    grad_scale
        What gradients are divided by: a float32 of the device's.
    found_inf
        A float32 of the device's: where it is not 0, no tensor of `tensors` is changed.
    max_norm, norm_type
        Gradients are used times ``max_norm / (norm + 1e-6)`` where that is below 1.
    norm
        Where the norm is written: a float64 of the device's.
    seed
        Of rounding at random.
    provider
        Where the tensors are.

    Raises
    ------
    TypeError, ValueError
        A tensor is not what its rule takes; nothing has been changed.
    DeviceError
        What the provider was given before has failed, or the step; nothing has been changed in the first case.
    NotImplementedError
        The provider has no optimizers.
    """

def pool_stats() -> dict[str, int]: ...
def pool_trim() -> None: ...
def told(provider: str) -> None:
    """Look, without a wait, for what the provider has failed of what it was given; told once.

    Raises
    ------
    DeviceError
        What it is.
    """

def restarts(signal: int) -> bool:
    """Whether calls of the system that a signal interrupts go on once its handler has run."""
