"""The requests that every run of the engine suite sends: seeded, ragged, some with a shared prefix."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

VOCAB = 2048
FIRST_WORD = 3  # tokens below are special
BATCH = 8


def _words(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(FIRST_WORD, VOCAB) for _ in range(count)]


def _prompts(seed: int, shortest: int, longest: int, prefix: int) -> list[list[int]]:
    rng = random.Random(seed)
    common = _words(rng, prefix)
    lengths = [shortest, longest, *(rng.randint(shortest, longest) for _ in range(BATCH - 2))]
    return [
        (common if number % 2 else []) + _words(rng, length - (prefix if number % 2 else 0))
        for number, length in enumerate(lengths)
    ]


def short_prompts(topk: int, max_tokens: int) -> list[list[int]]:
    """A batch whose contexts never pass `topk`: every row selects all it sees, so runs can be compared by bits."""
    return _prompts(1, 67, min(topk - max_tokens, 230), 64)


def long_prompts() -> list[list[int]]:
    """A batch in which topk selects: 600 to 3000 tokens, half of the requests with 500 in common."""
    return _prompts(2, 600, 3000, 500)


@dataclass(frozen=True)
class Request:
    """One request of random traffic.

    Attributes:
        prompt: token ids.
        max_tokens: tokens to generate.
        wait: engine steps after the previous request's arrival.
        abort_after: tokens after which the client hangs up, 0 for before the first; None when it does not.
    """

    prompt: list[int]
    max_tokens: int
    wait: int
    abort_after: int | None


def traffic(
    seed: int, *, longest: int = 3000, longest_output: int = 64, prefix: int = 512, prefixes: int = 4
) -> Iterator[Request]:
    """Endless random requests: lengths log-uniform, a third with one of a few prefixes, a tenth aborted.

    Args:
        seed: of everything.
        longest: most tokens of a prompt.
        longest_output: most tokens generated.
        prefix: tokens of a common prefix.
        prefixes: different ones.
    """
    rng = random.Random(seed)
    common = [_words(rng, prefix) for _ in range(prefixes)]
    while True:
        length = round(longest ** rng.uniform(0.2, 1.0))
        start = rng.choice(common) if rng.random() < 1 / 3 and length > prefix else []
        max_tokens = rng.randint(1, longest_output)
        abort_after = rng.choice((0, rng.randint(1, max_tokens))) if rng.random() < 0.1 else None
        yield Request(
            start + _words(rng, length - len(start)), max_tokens, rng.choice((0, 0, 1, 2, 5, 20)), abort_after
        )
