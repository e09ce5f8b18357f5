"""Benchmarks: what a backend costs on this machine, beside a copy of the same bytes."""

from hyv4_kvdequant.bench.gather import GatherShape, Measurement, measure_gather
from hyv4_kvdequant.timing import Timing

__all__ = ["GatherShape", "Measurement", "Timing", "measure_gather"]
