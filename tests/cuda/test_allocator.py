"""What the stand-in for PyTorch's memory holds its user to, and what the provider counts."""

from __future__ import annotations

import pytest
from cold_gpu import Cold

# Blocks of PyTorch's; what is written is written by the host, once the device is done.
BLOCKS = """
import ctypes
gpu.get(gpu.put(torch.ones(1)))
def block(size):
    at = ctypes.c_void_p()
    assert gpu.torch.aoti_torch_cuda_caching_allocator_raw_alloc(ctypes.c_uint64(size), ctypes.byref(at)) == 0
    gpu.wait(0)
    return at.value
def give_back(at):
    return gpu.torch.aoti_torch_cuda_caching_allocator_raw_delete(ctypes.c_void_p(at))
def write(at, data):
    gpu.driver.emulated_write(ctypes.c_void_p(at), data, ctypes.c_size_t(len(data)))
def read(at, size):
    data = ctypes.create_string_buffer(size)
    gpu.driver.emulated_read(data, ctypes.c_void_p(at), ctypes.c_size_t(size))
    return data.raw
def end():
    gpu.wait(0)
    print(gpu.counted().mistakes)
"""


@pytest.mark.parametrize(("first", "told"), [(0, False), (-1, True), (1, True)])
def test_who_writes_past_an_end_of_a_block_is_told_when_it_is_given_back(cold: Cold, first: int, told: bool) -> None:
    ran = cold.run(
        BLOCKS + f"with gpu.entered():\n at = block(700)\n write(at + {first}, bytes(700))\n give_back(at)\nend()"
    )
    assert (ran.out, ran.code) == (f"{told:d}\n", 0)
    assert ("written to before its begin or behind its end" in ran.err) == told


def test_who_gives_back_twice_is_told(cold: Cold) -> None:
    ran = cold.run(BLOCKS + "with gpu.entered():\n at = block(700)\n print(give_back(at), give_back(at))\nend()")
    assert (ran.out, ran.code) == ("0 1\n1\n", 0)
    assert "memory is given back that is not out" in ran.err


def test_what_is_given_back_is_spoilt_in_the_order_of_its_stream(cold: Cold) -> None:
    ran = cold.run(
        BLOCKS
        + """
with gpu.entered():
    at = block(4)
    write(at, b"good")
    gpu.pause(0)
    give_back(at)
    print(read(at, 4))
    gpu.resume(0)
    gpu.wait(0)
    print(read(at, 4))
    assert block(4) == at
"""
    )
    assert (ran.out, ran.err, ran.code) == ("b'good'\nb'\\xcb\\xcb\\xcb\\xcb'\n", "", 0)


def test_a_block_is_not_another_streams_while_its_own_may_use_it(cold: Cold) -> None:
    ran = cold.run(
        BLOCKS
        + """
with gpu.entered():
    first = block(700)
    give_back(first)
    gpu.use(gpu.stream())
    other = block(700)
    gpu.use(0)
    print(other != first, block(700) == first)
"""
    )
    assert (ran.out, ran.err, ran.code) == ("True True\n", "", 0)


def test_memory_that_is_not_out_is_not_counted_when_it_is_given_back(cold: Cold) -> None:
    ran = cold.run("""
given = gpu.put(torch.ones(100))
before = gpu.used_bytes()
gpu.give_back(given.data_ptr() + 4, 400)
print(before, gpu.used_bytes() - before)
""")
    assert (ran.out, ran.err, ran.code) == ("400 0\n", "", 0)
