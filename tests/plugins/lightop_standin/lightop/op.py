"""The raw namespace: ops as attributes, without `__all__`."""

from lightop import FACE, _ops

_FACES = {
    "six_arguments": _ops.SixArguments(),
    "newer": _ops.newer,
    "public_and_raw": _ops.deprecated,
    "dedup": _ops.dedup,
    "raises": _ops.raises,
    "unknown_signature": _ops.unknown_signature,
    "moved_argument": _ops.moved_argument,
}

if FACE in _FACES:
    decode_gather_and_up_convert_with_indices = _FACES[FACE]
