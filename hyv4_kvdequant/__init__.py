"""Interchangeable backends that gather and dequantize HY V4's fp8 KV cache to BF16.

Importing this package imports PyTorch and nothing heavier: no backend, no vLLM, no Triton, no device.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hyv4_kvdequant.contract import (
    API_VERSION,
    FP8_DS_MLA,
    LAYOUTS,
    BackendConflictError,
    BackendError,
    BackendLoadError,
    BackendUnavailableError,
    ConfigurationError,
    Features,
    GatherCall,
    GatherDequantBackend,
    HostError,
    InvalidCallError,
    KVDequantError,
    RecordLayout,
    StepFileError,
    Target,
    UnknownBackendError,
)

if TYPE_CHECKING:
    from hyv4_kvdequant.gather import (
        GatherResult,
        gather_dequantize,
        gather_dequantize_fp8_ds_mla_cache,
    )
    from hyv4_kvdequant.registry import load_backend, register_backend, registered_backends, unregister_backend
    from hyv4_kvdequant.selector import select_backend
    from hyv4_kvdequant.settings import Settings, load_settings

__version__ = "0.1.0"

# Resolved on first use: each of these modules imports a library that not every user of the contract needs.
_LAZY = {
    "GatherResult": "gather",
    "gather_dequantize": "gather",
    "gather_dequantize_fp8_ds_mla_cache": "gather",
    "load_backend": "registry",
    "register_backend": "registry",
    "registered_backends": "registry",
    "unregister_backend": "registry",
    "select_backend": "selector",
    "Settings": "settings",
    "load_settings": "settings",
}

__all__ = [
    "API_VERSION",
    "FP8_DS_MLA",
    "LAYOUTS",
    "BackendConflictError",
    "BackendError",
    "BackendLoadError",
    "BackendUnavailableError",
    "ConfigurationError",
    "Features",
    "GatherCall",
    "GatherDequantBackend",
    "GatherResult",
    "HostError",
    "InvalidCallError",
    "KVDequantError",
    "RecordLayout",
    "Settings",
    "StepFileError",
    "Target",
    "UnknownBackendError",
    "__version__",
    "gather_dequantize",
    "gather_dequantize_fp8_ds_mla_cache",
    "load_backend",
    "load_settings",
    "register_backend",
    "registered_backends",
    "select_backend",
    "unregister_backend",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
