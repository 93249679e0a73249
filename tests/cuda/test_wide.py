"""Kernels for tensors of 2^31 elements and more, of few: 32 bits hold no more than four in the processes here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import on_device
import pytest
from cold_gpu import Cold

MODULES = ("test_gpu", "test_moves", "test_lines", "test_channels_last")
# Tests elsewhere, of which each has more elements than that.
CASES = [
    "test_gpu.test_a_program_gives_what_the_cpu_gives(gpu)",  # with a row that is broadcast
    "test_gpu.test_another_shape_is_not_compiled_again(gpu)",
    "test_moves.test_transpose(gpu, torch.float32, (4, 3, 66, 5), [0, 3, 1, 2])",
    "test_moves.test_transpose(gpu, torch.bfloat16, (3, 5, 2, 6), [0, 2, 1, 3])",
    "test_moves.test_slice_and_back(gpu, torch.float32, (64, -100, -1))",
    "test_moves.test_joining_and_repeating(gpu, torch.float32)",
    "test_moves.test_gradients_of_single_elements(gpu)",
    "test_moves.test_gradients_of_several_outer_rows(gpu)",
    "test_moves.test_running_sums(gpu, torch.float32, (2, 30, 300), 1, 0)",
    "test_lines.test_a_sum_is_of_all_elements_once(gpu, (2, 300, 5, 16), [1])",
    "test_lines.test_a_sum_is_of_all_elements_once(gpu, (70, 2, 7, 7), [0, 2, 3])",
    "test_lines.test_a_sum_is_of_all_elements_once(gpu, (3, 2, 4, 2, 5, 2, 3, 2), [0, 2, 4, 6])",
    "test_lines.test_softmax_and_its_gradient(gpu, (4, 50, 7), 1, torch.bfloat16)",
    "test_lines.test_averages_and_their_gradients(gpu, *test_lines.POOLS[0], torch.float32, (2, 3))",
    "test_lines.test_gradients_of_maxima(gpu, *test_lines.MAXIMA[0], torch.float32)",
    "test_channels_last.test_a_pool_has_the_cpus_results_of_channels_second"
    "(gpu, *test_channels_last.POOLS[0], test_channels_last.SHAPES[0], torch.float32)",
]


@pytest.fixture(scope="module")
def wide(stand_ins: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cold]:
    server = Cold(
        *MODULES,
        EMULATED_NARROW_BITS="2",
        XDG_CACHE_HOME=str(tmp_path_factory.mktemp("cache")),
        PYTHONPATH=":".join(str(on_device.ROOT / at) for at in ("python", "tests/ops", "tests/cuda")),
    )
    yield server
    server.end()


@pytest.mark.parametrize("case", CASES)
def test_indices_of_64_bits_have_the_same_results(wide: Cold, case: str) -> None:
    assert wide.run(f"{case}\nassert gpu.counted().mistakes == 0") == ("", "", 0)


def test_programs_and_pools_are_written_for_them(wide: Cold, tmp_path: Path) -> None:
    for case in (CASES[0], CASES[13]):
        wide.run(case, EMULATED_SOURCES=str(tmp_path), XDG_CACHE_HOME=str(tmp_path))
    texts = [at.read_text() for at in tmp_path.glob("*.cu")]
    assert any("omc_gpu_wide_axis" in text and "const int64_t index" in text for text in texts)
    assert any("OMC_INDEX int64_t" in text for text in texts)


@pytest.mark.parametrize(("planes", "index"), [(10, "int32_t"), (20, "int64_t")])
def test_32_bits_are_to_hold_the_last_threads_of_a_launch_too(
    wide: Cold, tmp_path: Path, planes: int, index: str
) -> None:
    """Of 2000 elements there are 2048 threads, one more than the largest number here."""
    pool = "'AveragePool(%x0) {kernel_shape=[1, 1]}'"
    source = f"test_lines.assert_as_on_the_cpu(gpu, {pool}, [test_lines.random({planes}, 10, 10)], 1)"
    folder = str(tmp_path)
    wide.run(source, EMULATED_NARROW_BITS="11", EMULATED_SOURCES=folder, XDG_CACHE_HOME=folder)
    (text,) = [at.read_text() for at in tmp_path.glob("*.cu")]
    assert f"OMC_INDEX {index}" in text
