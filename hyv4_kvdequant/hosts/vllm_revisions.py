"""The revisions of mainline vLLM that this release knows, read in its wheels, and which one is installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from hyv4_kvdequant.contract import HostError
from hyv4_kvdequant.hosts.revisions import Revision, match_revision, source_signatures
from hyv4_kvdequant.versions import installed_version

IMPL_MODULE = "vllm.models.hy_v4.nvidia.flashmla_sparse"
IMPL_CLASS = "HYV4FlashMLASparseImpl"
BASE_MODULE = "vllm.v1.attention.backends.mla.flashmla_sparse"
BASE_CLASS = "FlashMLASparseImpl"


def _changed(revision: Revision, versions: str, **signatures: str) -> Revision:
    return Revision(versions, {**revision.signatures, **signatures})


_KERNEL = "self, q, kv_c_and_k_pe_cache, topk_indices, kernel_metadata"
_BF16 = "self, q, kv_c_and_k_pe_cache, topk_indices, topk_length=None, actual_num_heads=None"
_MIXED = "self, q, kv_c_and_k_pe_cache, topk_indices, attn_metadata"
REVISION_0_29 = Revision(
    "vLLM 0.29.0",
    {
        "_fp8_flash_mla_kernel": _KERNEL,
        "_bf16_flash_mla_kernel": _BF16,
        "forward_mqa": "self, q, kv_c_and_k_pe_cache, attn_metadata, layer",
        "_forward_fp8_kv_mixed_batch": _MIXED,
    },
)
REVISION_0_30 = _changed(REVISION_0_29, "vLLM 0.30.0", _forward_fp8_kv_mixed_batch=f"{_MIXED}, kernel_metadata=None")
REVISION_0_31 = _changed(REVISION_0_30, "vLLM 0.31.0 to 0.33.0", _bf16_flash_mla_kernel=f"{_BF16}, out=None")
REVISION_0_34 = _changed(REVISION_0_31, "vLLM 0.34.0", _fp8_flash_mla_kernel=f"{_KERNEL}, topk_length=None")
REVISIONS = (REVISION_0_29, REVISION_0_30, REVISION_0_31, REVISION_0_34)
"""Of the attention class, oldest first."""
BUILDER_REVISIONS = (
    Revision("vLLM 0.29.0 to 0.34.0", {"build": "self, common_prefix_len, common_attn_metadata, fast_build=False"}),
)
"""Of its metadata builder."""


def recognise_installed() -> str:
    """Which known revision the installed vLLM is, read off its source; nothing of it is imported.

    Raises:
        HostError: vLLM is not installed here, or is no revision that this release knows.
    """
    sources = [(_source(IMPL_MODULE), IMPL_CLASS), (_source(BASE_MODULE), BASE_CLASS)]
    found = match_revision(source_signatures(sources, list(REVISIONS[-1].signatures)), REVISIONS, IMPL_CLASS)
    if isinstance(found, str):
        raise HostError(f"The installed vLLM {installed_version('vllm')} is not a revision this release knows: {found}")
    return found.versions


def _source(module_name: str) -> str:
    # Only the top package is looked up: finding a submodule would import its parents.
    package, *path = module_name.split(".")
    spec = importlib.util.find_spec(package)
    roots = list(spec.submodule_search_locations or []) if spec is not None else []
    for root in roots:
        file = Path(root, *path).with_suffix(".py")
        if file.is_file():
            return file.read_text(encoding="utf-8")
    raise HostError(f"There is no {module_name} here: vLLM 0.29.0 to 0.34.0 is not installed in this environment.")
