"""The contract: what every backend meets. Imports nothing else of this package but the records and `lazy`.

A name is imported when it is first used: the errors need no PyTorch, the rest does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hyv4_kvdequant.lazy import lazy_names

if TYPE_CHECKING:
    from hyv4_kvdequant.contract.backend import API_VERSION, Features, GatherCall, GatherDequantBackend
    from hyv4_kvdequant.contract.errors import (
        BackendConflictError,
        BackendError,
        BackendLoadError,
        BackendUnavailableError,
        ConfigurationError,
        HostError,
        InvalidCallError,
        KVDequantError,
        StepFileError,
        UnknownBackendError,
    )
    from hyv4_kvdequant.contract.layout import FP8_DS_MLA, LAYOUTS, RecordLayout
    from hyv4_kvdequant.contract.target import Target

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
    "HostError",
    "InvalidCallError",
    "KVDequantError",
    "RecordLayout",
    "StepFileError",
    "Target",
    "UnknownBackendError",
]

_HOMES = {
    **dict.fromkeys(("API_VERSION", "Features", "GatherCall", "GatherDequantBackend"), "backend"),
    **dict.fromkeys(("FP8_DS_MLA", "LAYOUTS", "RecordLayout"), "layout"),
    "Target": "target",
    **dict.fromkeys((name for name in __all__ if name.endswith("Error")), "errors"),
}

# Type checkers have the imports above, and are to find a name that does not exist.
if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(__name__, _HOMES)
