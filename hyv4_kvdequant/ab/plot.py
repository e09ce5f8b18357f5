"""Pictures of A/B results. They need the `bench` extra."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hyv4_kvdequant.ab.replay import ReplayedCall
from hyv4_kvdequant.ab.verdict import Verdict
from hyv4_kvdequant.contract import ConfigurationError

_LONGEST_NAME = 60


def plot_report(verdict: Verdict, path: Path) -> None:
    """Mismatches by layer. Raises ConfigurationError without matplotlib, or when the file cannot be written."""
    figure = _figure()
    axes = figure.subplots()
    names = list(verdict.layers)
    axes.bar(range(len(names)), [verdict.layers[name].mismatches for name in names])
    axes.set(ylabel="mismatches", yscale="symlog")
    title = axes.set_title(f"Run {_shown(verdict.run_id)}: rows and indices that differ")
    axes.set_xticks(range(len(names)), labels=[_shown(name) for name in names], rotation=60, ha="right")
    # Names come from files: a dollar sign is one, and begins no formula.
    for text in (title, *axes.get_xticklabels()):
        text.set_parse_math(False)
    _save(figure, path)


def plot_replay(calls: Sequence[ReplayedCall], names: tuple[str, str], path: Path) -> None:
    """Time ratios call by call. Raises as `plot_report`."""
    figure = _figure()
    axes = figure.subplots()
    for mode in calls[0].times:
        axes.plot([call.ratio(mode) for call in calls], marker="o", linestyle="", label=mode)
    axes.axhline(1.0, color="black", linestyle="--")
    axes.set(title="Time of each recorded call", xlabel="call", ylabel=f"{names[0]} / {names[1]}")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend()
    _save(figure, path)


def _shown(name: str) -> str:
    return name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 3]}..."


def _figure() -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigurationError(
            "--plot needs matplotlib, which is not installed. Install it with: pip install 'hyv4-kvdequant[bench]'"
        ) from error
    return Figure(figsize=(8, 4.8), layout="constrained")


def _save(figure: Any, path: Path) -> None:
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"--plot {path} cannot be written: {error}") from error
