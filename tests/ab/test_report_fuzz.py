"""Reports from elsewhere, by a fuzz from the schema: what is read is a value or our error, and so is the verdict."""

from __future__ import annotations

import copy
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hyv4_kvdequant.ab.counters import FirstMismatch, LayerCounters
from hyv4_kvdequant.ab.report import Report, read_report, read_reports
from hyv4_kvdequant.ab.verdict import merge
from hyv4_kvdequant.cli.ab_verdict import EXIT_STATUS, as_dict, print_verdict
from hyv4_kvdequant.contract import ConfigurationError

FIRST = FirstMismatch(0, 1, 2, 3, 4, 5, 6)
GOOD = {
    "format": "hyv4_kvdequant.report",
    "version": 2,
    "report": asdict(
        Report(
            "run",
            0,
            1.0,
            True,
            "torch",
            "wrong",
            "cpu",
            captured={"64": True},
            errors=["RuntimeError"],
            layers={"layer.0": LayerCounters(10, 20, 1, 1, 1, 0, FIRST), "layer.1": LayerCounters(10, 20)},
            process="1-00000000",
        )
    ),
}


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a JSON value, from the outside in."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, one in inner for place in places(one, (*path, key)))]


def deep(depth: int) -> Any:
    value: Any = 0
    for turn in range(depth):
        value = [value] if turn % 2 else {"": value}
    return value


NUMBERS = st.sampled_from([0, -1, 1, 2**31, 2**63, -(2**63) - 1, 10**400, 1e308, -0.0, float("nan"), float("inf")])
NONSENSE = st.one_of(
    NUMBERS,
    st.none(),
    st.booleans(),
    st.text(max_size=20),
    st.sampled_from(["", "\x1b[2J", "[/]", "\ud800", "x" * 10_000, [], {}, [[]], {"": {}}]),
    st.integers(1, 400).map(deep),
    st.recursive(st.none() | NUMBERS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner)),
)
# Values of the right type that nobody would write.
VALID = st.sampled_from([0, 1, 2**20, 2**63 - 1, 1e12, "", "[/]l0", "\u202e", True, None, {}, []])
REMOVE = object()


@st.composite
def damaged(draw: st.DrawFn) -> Any:
    """A good report with up to three places removed, replaced or added to."""
    value = copy.deepcopy(GOOD)
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.sampled_from(places(value)))
        drawn = draw(st.one_of(NONSENSE, VALID, st.just(REMOVE)))
        # A later turn may add to it, which must not change what is drawn from: hypothesis would call that flaky.
        new = drawn if drawn is REMOVE else copy.deepcopy(drawn)
        if not place:
            if new is REMOVE or draw(st.integers(0, 9)):
                continue
            return new
        holder: Any = value
        for key in place[:-1]:
            holder = holder[key]
        if new is REMOVE:
            del holder[place[-1]]
        elif isinstance(holder, dict) and draw(st.integers(0, 4)) == 0:
            holder[draw(st.text(max_size=8))] = new
        else:
            holder[place[-1]] = new
    return value


@settings(max_examples=2000, deadline=None, suppress_health_check=list(HealthCheck))
@given(value=damaged())
def test_a_report_from_elsewhere_is_a_value_or_our_error(value: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = _path(tmp_path_factory)
    path.write_text(json.dumps(value))
    _read_and_show(path)


@settings(max_examples=500, deadline=None, suppress_health_check=list(HealthCheck))
@given(at=st.integers(0, 2000), new=st.binary(max_size=4), cut=st.booleans())
def test_a_report_with_damaged_bytes_is_a_value_or_our_error(
    at: int, new: bytes, cut: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    content = json.dumps(GOOD).encode()
    at %= len(content)
    path = _path(tmp_path_factory)
    path.write_bytes(content[:at] + new + (b"" if cut else content[at + len(new) :]))
    _read_and_show(path)


COUNTS = st.integers(0, 2**63 - 1)
LAYERS = st.builds(
    LayerCounters,
    **dict.fromkeys(
        ("calls", "rows_compared", "rows_differ", "elements_differ", "largest_ulp", "lost_entries"), COUNTS
    ),
    index_disagreements=COUNTS,
    first=st.none() | st.builds(FirstMismatch, COUNTS, COUNTS, COUNTS, st.integers(-1, 1023), COUNTS, COUNTS, COUNTS),
)
REPORTS = st.builds(
    Report,
    *(st.text(), st.integers(0, 2**20 - 1), st.floats(0, 1e12), st.booleans(), st.text(), st.none() | st.text()),
    *(st.text(), st.integers(1, 2**63 - 1), st.dictionaries(st.text(), st.booleans()), st.lists(st.text())),
    *(st.dictionaries(st.text(), LAYERS, max_size=3), st.integers(1, 2**20), st.text(), st.integers(1, 999_999_999)),
    write_every_s=st.floats(0, 86400),
)


@settings(max_examples=500, deadline=None, suppress_health_check=list(HealthCheck))
@given(report=REPORTS)
def test_whatever_fits_the_schema_is_read_back_and_shown(
    report: Report, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = _path(tmp_path_factory)
    path.write_text(json.dumps({**GOOD, "report": asdict(report)}))
    assert read_report(path) == report
    _read_and_show(path)


_folder: list[Path] = []


def _path(factory: pytest.TempPathFactory) -> Path:
    if not _folder:
        _folder.append(factory.mktemp("fuzz"))
    return _folder[0] / "report-000001-run-rank0-1-00000000.json"


def _read_and_show(path: Path) -> None:
    try:
        report = read_report(path)
    except ConfigurationError:
        with pytest.raises(ConfigurationError, match=path.name):
            read_reports(path.parent)
        return
    every = report.total
    assert all(type(number) is int for number in (report.rank, report.every, every.calls, every.lost_entries))
    verdict = merge(read_reports(path.parent))
    assert verdict.outcome in EXIT_STATUS
    json.dumps(as_dict(verdict))
    print_verdict(verdict)


def test_the_report_that_is_damaged_is_good(tmp_path: Path) -> None:
    path = tmp_path / "report-000001-run-rank0-1-00000000.json"
    path.write_text(json.dumps(GOOD))
    assert asdict(read_report(path)) == GOOD["report"]
