"""Interchangeable backends that gather and dequantize HY V4's fp8 KV cache to BF16.

Importing this package imports nothing heavy: no PyTorch, no backend, no vLLM, no Triton, no device. A name is
imported when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hyv4_kvdequant.lazy import lazy_names

if TYPE_CHECKING:
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
    from hyv4_kvdequant.gather import (
        GatherResult,
        gather_dequantize,
        gather_dequantize_fp8_ds_mla_cache,
    )
    from hyv4_kvdequant.registry import load_backend, register_backend, registered_backends, unregister_backend
    from hyv4_kvdequant.selector import select_backend
    from hyv4_kvdequant.settings import Settings, load_settings

__version__ = "0.1.0"

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

_ELSEWHERE = {
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
_HOMES = {name: _ELSEWHERE.get(name, "contract") for name in __all__ if name != "__version__"}

# Type checkers have the imports above, and are to find a name that does not exist.
if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(__name__, _HOMES, ("__version__",))
