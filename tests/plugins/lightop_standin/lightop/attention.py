"""A public category: only what `__all__` lists is public."""

from lightop import FACE, _ops

__all__ = ["paged_mqa_logits"]

# Reachable here in every face, but public only where it is listed.
decode_gather_and_up_convert_with_indices = _ops.newer


def paged_mqa_logits() -> None:
    """Any other op."""


if FACE == "category_error":
    raise OSError("libattention.so: cannot open shared object file: No such file or directory")
if FACE in ("public_category", "public_and_raw"):
    __all__ += ["decode_gather_and_up_convert_with_indices"]
