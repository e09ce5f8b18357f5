"""The whole engine on a GPU: `pytest -m engine tests/engine`. What it claims and how is in docs/verification.md."""

from __future__ import annotations

from typing import Any

import pytest
from checks import CHECKS


@pytest.mark.engine
@pytest.mark.parametrize("check", CHECKS)
def test_what_was_run_holds(check: str, results: dict[str, Any], request: pytest.FixtureRequest) -> None:
    lines = list(CHECKS[check](results))
    print("\n".join(f"{line.claim}: {line.holds} ({line.detail})" for line in lines))
    assert [line for line in lines if line.holds is False] == []
    assert lines or request.config.getoption("--engine-only", default=[]), "nothing was claimed"
