"""What the C library's allocator has given out, which unlike the resident size has no holes in it."""

import ctypes

_BEFORE = ("arena", "ordblks", "smblks", "hblks")
_AFTER = ("usmblks", "fsmblks")


class _Malloc(ctypes.Structure):
    """The allocator's account of itself, as `mallinfo2` returns it."""

    _fields_ = [(name, ctypes.c_size_t) for name in (*_BEFORE, "mapped", *_AFTER, "allocated", "fordblks", "keepcost")]


_libc = ctypes.CDLL(None)
_libc.mallinfo2.restype = _Malloc


def allocated() -> int:
    """Bytes in use, those mapped one by one among them."""
    now = _libc.mallinfo2()
    return int(now.allocated + now.mapped)
