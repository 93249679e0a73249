"""The call of a module that is traced: what it is given, what a graph gives of it, and what is refused.

A graph gives results, attributes that the forward sets, and buffers. What a forward does besides would be lost.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from ..errors import NotExportable, NotInitialized
from ..flatten import Spec, flatten, unflatten
from ..guards.held import Scan, Snapshot, Write
from ..guards.watch import Watch
from ..symbolic import memory_of
from ..terms import Terms
from .autocast_region import Region, within
from .numbers import marked
from .private import in_place_of, set_elsewhere
from .refusals import SETS_REQUIRES_GRAD, check_attributes, nothing_lost
from .symbols import numbers_to_the_user


class Trace:
    """One call of a module on the tensors of a trace, in the place of its own and of the user's.

    Parameters
    ----------
    module
        The module.
    terms
        Say what of its result the graph gives.
    arguments
        The nest of its (args, kwargs), in which symbols stand for numbers that are left open.
    leaves
        The user's tensors in that nest.
    scan
        The module's tensors.
    names
        Of all of these: the user's tensors, parameters, buffers.
    region
        The region of autocast that the module is called in.
    watch
        Sees what the forward reads besides tensors.

    Attributes
    ----------
    writes
        Attributes of submodules that the forward sets.
    rebound
        Buffers for which it sets other tensors.
    out_spec
        How what the graph gives nests: results, values of `writes`, then those of `rebound`.
    """

    writes: list[Write]
    rebound: list[tuple[nn.Module, str]]
    out_spec: Spec

    def __init__(
        self,
        module: nn.Module,
        terms: Terms,
        arguments: Spec,
        leaves: Sequence[Tensor],
        scan: Scan,
        names: Sequence[str],
        region: Region,
        watch: Watch,
    ) -> None:
        self.module = module
        self._terms = terms
        self._arguments = arguments
        self._leaves = leaves
        self._scan = scan
        self._names = names
        self._region = region
        self.watch = watch
        self._before = Snapshot(module)
        self._set_elsewhere: set[tuple[int, str]] = set()  # by other threads: a module's id, and the attribute

    @contextlib.contextmanager
    def undone(self) -> Iterator[None]:
        """Within it the module may be called; in the end it is as before, but for what other threads have set."""
        with set_elsewhere() as self._set_elsewhere:
            try:
                yield
            finally:
                self.watch.restore()
                self._before.restore(self._set_elsewhere)

    def run(self, tensors: list[Tensor]) -> list[Any]:
        """Call the module.

        Parameters
        ----------
        tensors
            Those that stand for the user's, for parameters and for buffers.

        Returns
        -------
        list
            The leaves of `out_spec`, then all buffers, which the forward changes in copies.

        Raises
        ------
        NotExportable
            If a graph cannot stand for the call.
        """
        first_parameter = len(self._leaves)
        first_buffer = first_parameter + len(self._scan.parameters)
        user, parameters = tensors[:first_parameter], tensors[first_parameter:first_buffer]
        buffers = [t.clone() for t in tensors[first_buffer:]]
        held = dict(zip(self._names, [*user, *parameters, *buffers], strict=True))
        memory = {name: memory_of(t) for name, t in held.items()}
        arguments = unflatten(self._arguments, iter(user))
        flat = flatten(arguments)
        result, values = self._call(arguments, user, parameters, buffers)
        for name, t in held.items():
            if memory_of(t) != memory[name]:
                raise NotExportable(f"the forward changes in place how {name} lies in memory")
        self.watch.check()
        originals = [*self._leaves, *self._scan.parameters, *self._scan.buffers]
        check_attributes(self.watch, originals, [*tensors, result])
        self._check_changes(result, arguments, flat)
        out, self.out_spec = flatten((result, [w.after for w in self.writes], values))
        asked = self.watch.asked
        if asked and any(t.untyped_storage()._cdata in asked for t in (*out, *held.values())):
            raise NotExportable(SETS_REQUIRES_GRAD)
        return [*map(marked, out), *buffers]

    def _call(
        self, arguments: Any, user: list[Tensor], parameters: list[Tensor], buffers: list[Tensor]
    ) -> tuple[Any, list[Any]]:
        """The result, and the buffers that the forward sets."""
        args, kwargs = arguments
        module = self.module
        with (
            within(self._region, caches=True),
            nothing_lost(self.watch, user),
            in_place_of(module, (self._scan.parameters, parameters), (self._scan.buffers, buffers)),
        ):
            before = [(m, dict(m._parameters), dict(m._buffers)) for m in module.modules()]
            with self.watch.active(), numbers_to_the_user(self.watch.refuse):
                result = module(*args, **kwargs)
            result = self._terms.result(module, result)
            self.rebound = _rebound(before)
            return result, [m._buffers[name] for m, name in self.rebound]

    def _check_changes(self, result: Any, arguments: Any, flat: tuple[list[Tensor], Spec]) -> None:
        """Find the attributes that the forward has set, which the graph gives; refuse all else that it has changed."""
        writes = [*self._before.writes(), *self.watch.writes()]
        for w in writes:
            if (id(w.module), w.name) in self._set_elsewhere:
                raise NotInitialized(f"another thread sets {w}")
        changed = dict(self._before.changed())
        for name in [name for name, is_another in changed.items() if is_another]:
            raise NotInitialized(f"the forward changes {name}")
        self.watch.check_results((result, [w.after for w in writes]), arguments)
        self.watch.check_unchanged(writes)
        self.writes = [w for w in writes if not w.remade]
        _check_arguments_unchanged(arguments, *flat)
        for name in changed:
            raise NotExportable(f"the forward changes {name}")


def _rebound(before: list[tuple[nn.Module, dict[str, Any], dict[str, Any]]]) -> list[tuple[nn.Module, str]]:
    """The buffers that are other tensors since, of submodules with their parameters and buffers as they were."""
    rebound = []
    for m, parameters, buffers in before:
        cls = type(m).__name__
        for registry, now in ((parameters, m._parameters), (buffers, m._buffers)):
            if list(registry) != list(now):
                raise NotInitialized(f"the forward changes what parameters or buffers {cls} has")
        for name in parameters:
            if m._parameters[name] is not parameters[name]:
                raise NotExportable(f"the forward replaces parameter {name} of {cls}")
        for name in buffers:
            if m._buffers[name] is not buffers[name]:
                if not isinstance(m._buffers[name], Tensor) or buffers[name] is None:
                    raise NotExportable(f"the forward sets buffer {name} of {cls} from or to None")
                rebound.append((m, name))
    return rebound


def _check_arguments_unchanged(arguments: Any, before: list[Tensor], spec: Spec) -> None:
    """A graph gives results; what a forward puts into a dict, list or cache of its caller would be lost."""
    leaves, now = flatten(arguments)
    if now != spec or any(a is not b for a, b in zip(leaves, before, strict=True)):
        raise NotExportable("the forward changes a list, dict or object among its arguments")
