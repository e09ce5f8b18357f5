"""The names of our environment variables, and which other names are so near that they can only be meant for us.

Every vLLM process on a machine with this package installed asks that before anything else is imported, so this module
imports the standard library alone.
"""

from __future__ import annotations

import re
from difflib import SequenceMatcher

GATE = "VLLM_HCU_HYV4_FP8_KV_DEQUANT"
PREFIX = GATE + "_"

_NEAR_GATE = 0.93  # a letter or two of the gate's name
_NEAR_WORD = 0.85  # a letter of DEQUANT; QUANT is a word of its own


def is_like_ours(name: str) -> bool:
    """Whether an environment variable is one of ours or can only be meant for one: misspelt, shortened, in other case.

    vllm_hcu's own variables begin like ours, and other models have variables like ours. So a name counts only with our
    word, DEQUANT, and only if, up to that word, it is the gate but for a letter or two, is the gate's end, or is one of
    vLLM's that says HYV4 and KV. Another digit is another thing (HYV3, FP4).
    """
    upper = name.upper()
    if upper.startswith(GATE):
        return True
    if "4" not in upper:  # almost every name of an environment ends here
        return False
    words = re.split(r"[^A-Z0-9]+", upper)
    last = next((number for number, word in enumerate(words) if _is_dequant(word)), None)
    if last is None:
        return False
    head = "".join(words[: last + 1])
    digits = re.sub(r"[^0-9]", "", head)
    misspelt = digits == "48" and _ratio(head, GATE.replace("_", "")) >= _NEAR_GATE
    shortened = "HYV4" in upper and GATE.endswith(upper)
    # FP8 may be left out.
    reworded = digits in ("4", "48") and head.startswith("VLLM") and "KV" in head and bool(re.search("HYV?4", head))
    return misspelt or shortened or reworded


def _is_dequant(word: str) -> bool:
    return "DEQUANT" in word or _ratio(word, "DEQUANT") >= _NEAR_WORD


def _ratio(a: str, b: str) -> float:
    return SequenceMatcher(None, a, b, autojunk=False).ratio()
