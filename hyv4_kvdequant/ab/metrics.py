"""Prometheus series of the shadow and of lost entries, in prometheus-client's default registry.

vLLM's `/metrics` shows them where the API server and the worker are one process, or where PROMETHEUS_MULTIPROC_DIR is
set for both: plain counters, unlike custom collectors, are written to the files of that folder. Without it a
worker in a process of its own has a registry of its own, and the reports are the place to look.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge

from hyv4_kvdequant.ab.counters import LayerCounters

_LABELS = ("backend", "role", "rank", "layer")
_LOST_LABELS = ("backend", "rank", "layer")
_COUNTED = {
    "calls": "Calls in which the shadow was compared with the primary.",
    "rows_compared": "Dequantized rows that were compared.",
    "rows_differ": "Rows that differ.",
    "elements_differ": "Elements that differ.",
    "index_disagreements": "Entries whose indices disagree.",
}


@dataclass
class _Series:
    counters: dict[str, Counter]
    largest_ulp: Gauge
    lost: Counter


_series: dict[int, _Series] = {}


def _series_of(registry: CollectorRegistry) -> _Series:
    # A registry refuses a name twice, and two engines may live in one process.
    if id(registry) not in _series:
        counters = {
            name: Counter(f"hyv4_kvdequant_shadow_{name}", text, _LABELS, registry=registry)
            for name, text in _COUNTED.items()
        }
        largest = Gauge(
            "hyv4_kvdequant_shadow_largest_ulp",
            "Largest difference of an element, in bf16 steps.",
            _LABELS,
            registry=registry,
            multiprocess_mode="max",
        )
        lost = Counter(
            "hyv4_kvdequant_lost_entries",
            "Filled entries that became unfilled between the host's indices and the sparse kernel.",
            _LOST_LABELS,
            registry=registry,
        )
        _series[id(registry)] = _Series(counters, largest, lost)
    return _series[id(registry)]


@dataclass
class Metrics:
    """Feeds the series of one rank; counters get what was added since the last time.

    Attributes:
        primary: the backend that serves, by name.
        shadow: the one compared with it; None where there is none, and then there are no series of it.
        rank: of this worker.
    """

    primary: str
    shadow: str | None
    rank: int
    registry: CollectorRegistry = REGISTRY
    _seen: dict[str, LayerCounters] = field(default_factory=dict)

    def update(self, layers: dict[str, LayerCounters]) -> None:
        """Brings the series to these counters."""
        series = _series_of(self.registry)
        for layer, now in layers.items():
            before = self._seen.get(layer, LayerCounters())
            # What may fail is making a series, so all are there before any is counted up: a retry counts nothing twice.
            counters = {"lost_entries": series.lost.labels(self.primary, str(self.rank), layer)}
            largest = None
            if self.shadow is not None:
                labels = (self.shadow, "shadow", str(self.rank), layer)
                counters |= {name: counter.labels(*labels) for name, counter in series.counters.items()}
                largest = series.largest_ulp.labels(*labels)
            for name, counter in counters.items():
                counter.inc(max(0, getattr(now, name) - getattr(before, name)))
            if largest is not None:
                largest.set(now.largest_ulp)
            self._seen[layer] = now
