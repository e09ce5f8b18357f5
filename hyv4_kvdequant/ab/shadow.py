"""The shadow: a second backend that runs beside the first on live traffic and is compared with it on the device."""

from __future__ import annotations

import logging
from dataclasses import replace

import torch

from hyv4_kvdequant.ab.compare import compare
from hyv4_kvdequant.ab.counters import COLUMN
from hyv4_kvdequant.ab.monitor import READ_EVERY_S, Monitor, ShadowState
from hyv4_kvdequant.contract import ConfigurationError, GatherCall, GatherDequantBackend, Target
from hyv4_kvdequant.gather import run_call
from hyv4_kvdequant.memory import outside_memory_pools
from hyv4_kvdequant.probe import load_for_start_up
from hyv4_kvdequant.registry import describe
from hyv4_kvdequant.selector import get_backend
from hyv4_kvdequant.settings import Settings, variable_name

logger = logging.getLogger(__name__)


class Shadow:
    """Runs the shadow backend after the primary and compares. One a device; its monitor reads what it counts."""

    def __init__(self, primary: GatherDequantBackend, shadow: GatherDequantBackend, monitor: Monitor) -> None:
        """Takes both backends and the monitor, which was made with this shadow's state."""
        assert monitor.shadow is not None
        self.primary, self.backend, self.monitor = primary, shadow, monitor
        self.every, self.captured, self.errors = (
            monitor.shadow.every,
            monitor.shadow.captured,
            monitor.shadow.errors,
        )
        self._turns: dict[int, int] = {}
        logger.info(
            "Shadow is on: %s beside %s, rank %d, run %s, every call of %d of a layer in eager mode; reports in %s",
            describe(shadow.name),
            describe(primary.name),
            monitor.rank,
            monitor.run_id,
            self.every,
            monitor.report_dir,
        )

    def layer_index(self, name: str) -> int:
        """The counters' row of a layer; the next free one when it is new."""
        return self.monitor.layer_index(name)

    def observe(
        self, call: GatherCall, compact_kv: torch.Tensor, compact_indices: torch.Tensor, layer: int
    ) -> torch.Tensor | None:
        """Runs the shadow on the primary's call and compares, on the current stream.

        Args:
            call: the call, filled by the primary.
            compact_kv, compact_indices: buffers of the call's shapes for the shadow.
            layer: from `layer_index`.

        Returns:
            (2,) int64 on the device, this layer's mismatches before and after this call; None in a captured graph,
            where sampling skips the call, or once the shadow is switched off.
        """
        capturing = call.kv_cache.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if self.errors or not self._sampled(layer, call.num_tokens, capturing):
            return None
        row = self.monitor.row(layer)
        try:
            before = None if capturing else _mismatches(row)
            # The shadow's own buffers hold no mapping to reuse.
            run_call(
                self.backend,
                replace(call, compact_kv=compact_kv, compact_indices=compact_indices, reuse_compact_indices=False),
            )
            compare(call, compact_kv, compact_indices, row)
        except Exception as error:
            self.errors.append(f"{type(error).__name__}: {error}")
            logger.exception(
                "The shadow %s raised and is switched off; %s serves on", self.backend.name, self.primary.name
            )
            return None
        return None if before is None else torch.stack([before, _mismatches(row)])

    def _sampled(self, layer: int, num_tokens: int, capturing: bool) -> bool:
        turn = self._turns.get(layer, 0)
        self._turns[layer] = turn + 1
        sampled = turn % self.every == 0
        if capturing:
            # What a graph holds is fixed now: a batch size is compared in every replay, or in none.
            key = str(num_tokens)
            sampled = self.captured.setdefault(key, sampled)
        return sampled


def _mismatches(row: torch.Tensor) -> torch.Tensor:
    return row[COLUMN["rows_differ"]] + row[COLUMN["index_disagreements"]]


def make_monitor(
    primary: GatherDequantBackend,
    settings: Settings,
    target: Target,
    rank: int = 0,
    run_id: str | None = None,
    *,
    world_size: int = 1,
    read_every_s: float = READ_EVERY_S,
) -> tuple[Monitor, Shadow | None]:
    """The monitor of a device, and the shadow that the settings ask for, or None when they ask for none.

    Args:
        primary: the backend that serves.
        settings: name the shadow and the report folder.
        target: what both backends are held against; its device has the counters.
        rank, run_id, world_size, read_every_s: as `Monitor`.

    Raises:
        ConfigurationError: the shadow is the primary, or the report folder cannot be written.
        BackendError: the shadow cannot be had; as for a primary, nothing is tried in its place.
    """
    backend = None if settings.shadow is None else _shadow_backend(primary, settings, target)
    state = None if backend is None else ShadowState(backend.name, settings.shadow_every)
    monitor = Monitor(
        primary.name,
        settings,
        device=target.device,
        rank=rank,
        run_id=run_id,
        world_size=world_size,
        shadow=state,
        read_every_s=read_every_s,
    )
    return monitor, None if backend is None else Shadow(primary, backend, monitor)


def _shadow_backend(primary: GatherDequantBackend, settings: Settings, target: Target) -> GatherDequantBackend:
    name = str(settings.shadow)
    if name == primary.name:
        raise ConfigurationError(
            f"{variable_name('shadow')} is {name!r}, the backend that already serves; comparing it with "
            "itself would prove nothing. What to do: name another backend, or unset it."
        )
    load_for_start_up({name: settings.source("shadow")})
    # What a backend keeps for good may not lie where a host takes memory away while it sleeps.
    return outside_memory_pools(target.device, lambda: get_backend(name, target, settings.source("shadow")))
