"""What a process does when one of our variables is set: check the settings, tell vLLM of them, hook the hosts."""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Callable

from hyv4_kvdequant.hosts import vllm_hcu, vllm_mainline
from hyv4_kvdequant.probe import load_for_start_up
from hyv4_kvdequant.settings import load_settings, variable_names


def start_up() -> None:
    """Settings, then hooks. Raises as `plugin.register`; does nothing more than check when the gate is off."""
    settings = load_settings()
    _make_known_to_vllm()
    if not settings.enabled:
        return
    named = {name: field for field in ("shadow", "backend") if (name := getattr(settings, field)) is not None}
    load_for_start_up({name: settings.source(field) for name, field in named.items()})
    _log_through_vllm()
    vllm_mainline.install()
    vllm_hcu.install()


def _make_known_to_vllm() -> None:
    """Adds our variables to `vllm.envs`: no warning about them, and they are part of the compile-cache key."""
    if importlib.util.find_spec("vllm") is None:
        return
    import vllm.envs

    for variable in variable_names():
        vllm.envs.environment_variables.setdefault(variable, _reader(variable))


def _reader(variable: str) -> Callable[[], str | None]:
    return lambda: os.environ.get(variable)


class _ThroughVllm(logging.Handler):
    """Hands our records to vLLM's logger: vLLM sets up its own logger only, and may do so after plugins are loaded."""

    def emit(self, record: logging.LogRecord) -> None:
        vllm_logger = logging.getLogger("vllm")
        if vllm_logger.isEnabledFor(record.levelno):
            vllm_logger.handle(record)


def _log_through_vllm() -> None:
    ours = logging.getLogger("hyv4_kvdequant")
    if not any(isinstance(handler, _ThroughVllm) for handler in ours.handlers):
        ours.addHandler(_ThroughVllm())
        ours.setLevel(logging.DEBUG)
        ours.propagate = False
