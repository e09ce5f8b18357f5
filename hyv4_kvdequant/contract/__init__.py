"""The contract: what every backend meets. Imports nothing else of this package but the records."""

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
