"""Exceptions of the package and its inner signals."""

from torch import OutOfMemoryError

from . import _C


class ORTModuleError(RuntimeError):
    """Raised when a module cannot be run as asked and falling back to PyTorch was ruled out."""


class NotExportable(ORTModuleError):
    """The module as a whole cannot become a graph; the message is the cause.

    Attributes
    ----------
    of_forward
        Whether it is for what the forward does besides computing, which would be done by trying it, too.
    """

    of_forward = False


class ForwardRaised(NotExportable):
    """What the forward calls raised while it was traced: in PyTorch it may do so too."""


class NodeRefused(NotExportable):
    """No graph can hold one of its nodes, of which it is not known what line of the user's made it."""


class NotRunnable(NotExportable):
    """No graph can take such tensors, or say no where PyTorch does, whoever captures it."""


class TooManyGraphs(NotRunnable):
    """As many graphs as there may be are in use; later they may no longer be."""


class NotInitialized(NotExportable):
    """The module is not yet what its later calls meet; the message is what a call in PyTorch changes for good."""


class Mistake(BaseException):
    """What ortmodule_c itself did wrong, where that is an error: nothing falls back to PyTorch because of it."""


class Unsupported(Exception):
    """One ATen op cannot be expressed with our kernels; it then runs in PyTorch."""


class NeedsStatic(Exception):
    """A graph with symbolic dims cannot express this module; it is exported once per shape instead."""


class NeedsFunctional(Exception):
    """The captured graph changes memory seen through more than one view; it has to be functionalised first."""


def first_lines(error: BaseException | str) -> str:
    """As much of an error's message, or of another text, as fits into one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2])[:300]


def of_the_machine(error: BaseException | None) -> BaseException | None:
    """The error itself or what it was raised from, if that says that memory ran out or that a device failed."""
    while error is not None and not isinstance(error, (MemoryError, OutOfMemoryError, _C.DeviceError)):
        if "can't allocate memory" in str(error) and error.__cause__ is None:
            return error
        error = error.__cause__
    return error
