"""The benchmark as a picture: time against tokens, one line a backend, the floor dashed. Needs the `bench` extra."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hyv4_kvdequant.bench.gather import FLOOR, Measurement
from hyv4_kvdequant.contract import ConfigurationError


def plot_gather(measurements: Sequence[Measurement], path: Path, title: str) -> None:
    """Writes the plot in the format that the path's ending names. Both axes are logarithmic.

    Raises:
        ConfigurationError: matplotlib is not installed, or it cannot write such a file.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigurationError(
            "--plot needs matplotlib, which is not installed. Install it with: pip install 'hyv4-kvdequant[bench]'"
        ) from error
    modes = list(dict.fromkeys(one.mode for one in measurements if one.mode != "first"))
    figure = Figure(figsize=(6.4 * len(modes), 4.8), layout="constrained")
    figure.suptitle(title, fontsize="small")
    for axes, mode in zip(figure.subplots(1, len(modes), squeeze=False)[0], modes, strict=True):
        of_mode = [one for one in measurements if one.mode == mode]
        for name in dict.fromkeys(one.backend for one in of_mode):
            line = [one for one in of_mode if one.backend == name]
            style = {"linestyle": "--", "color": "black"} if name == FLOOR else {"marker": "o"}
            label = f"{FLOOR} of the same bytes" if name == FLOOR else name
            axes.plot([one.num_tokens for one in line], [one.timing.median_us for one in line], label=label, **style)
        tokens = sorted({one.num_tokens for one in of_mode})
        axes.set(xscale="log", yscale="log", title=mode, xlabel="query tokens", ylabel="median time, µs")
        axes.set_xticks(tokens, labels=[str(count) for count in tokens])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend()
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"--plot {path} cannot be written: {error}") from error
