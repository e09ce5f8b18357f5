"""Options of `pytest -m engine tests/engine`, and one run of the suite for all its tests."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("engine suite")
    group.addoption("--engine-only", nargs="*", default=[], metavar="NAME", help="configurations, serve, start-up")
    group.addoption("--engine-out", type=Path, default=None, help="folder for checkpoints, logs and results")
    group.addoption("--engine-parallel", type=int, default=3, help="engines at a time, where memory is not measured")
    group.addoption("--soak-seconds", type=float, default=60.0, help="of random traffic")


@pytest.fixture(scope="session")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    import run
    import torch

    if not torch.cuda.is_available() or find_spec("vllm") is None:
        pytest.fail("the engine suite needs a GPU and vLLM; leave out `-m engine` where there are none")
    option = request.config.getoption
    out = option("--engine-out", default=None) or tmp_path_factory.mktemp("engine")
    suite = run.Suite(out, option("--soak-seconds", default=60.0), budget_seconds=3600.0)
    run.run(suite, option("--engine-only", default=[]), option("--engine-parallel", default=3))
    run.write(suite)
    return suite.results
