"""``--update`` rewrites golden texts."""

import sys
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent)]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update", action="store_true", help="rewrite golden texts")


@pytest.fixture
def update(request: pytest.FixtureRequest) -> bool:
    return request.config.getoption("--update", False)
