"""Does the speculative loop emit the plain sampler's distribution? A chi-square test of counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from examples.engine import Drafter, generate
from examples.model import Decoder

#: Cells of the table with fewer counts than this, in both samples together, are pooled.
MIN_CELL = 10


def sample_openings(
    target: Decoder,
    drafter: Drafter | None,
    context: bytes,
    *,
    num_tokens: int,
    temperature: float,
    first_seed: int,
    rounds: int,
) -> list[bytes]:
    """Decodes one context over and over, with a seed of its own for every request.

    Args:
        target: Its batch is the number of requests of a round.
        drafter: What proposes drafts; None decodes plainly.
        context: The text that all requests start from.
        num_tokens: Bytes to write; the loop may draft one less.
        temperature: For all requests.
        first_seed: Seeds count up from here.
        rounds: Number of batches.

    Returns:
        What the requests wrote.

    Raises:
        RuntimeError: A drafter had no draft accepted, so that the sample would not show anything.
    """
    openings: list[bytes] = []
    accepted = 0
    for i in range(rounds):
        generation = generate(
            target,
            drafter,
            [context] * target.batch,
            num_tokens=num_tokens,
            temperature=temperature,
            seeds=first_seed + i * target.batch + torch.arange(target.batch),
            max_drafts=num_tokens - 1,
            prompts_cached=i > 0,
        )
        openings += generation.texts
        accepted += sum(generation.accepted)
    if drafter is not None and accepted == 0:
        raise RuntimeError(f"no draft was accepted after {context!r}")
    return openings


def two_sample_p_value(pairs: Sequence[tuple[Counter[int], Counter[int]]]) -> float:
    """P-value of the hypothesis that both counters of every pair were drawn from one distribution.

    Args:
        pairs: Counts of two independent samples, one pair for each context. Their statistics are added.

    Returns:
        The upper tail of the chi-square distribution; 1 if no pair has two cells.
    """
    statistic, degrees = 0.0, 0
    for a, b in pairs:
        cells = [(a[key], b[key]) for key in sorted(a.keys() | b.keys())]
        large = [cell for cell in cells if sum(cell) >= MIN_CELL]
        rest = [cell for cell in cells if sum(cell) < MIN_CELL]
        if rest:
            large.append((sum(x for x, _ in rest), sum(y for _, y in rest)))
        share = sum(x for x, _ in large) / sum(x + y for x, y in large)
        for x, y in large:
            statistic += (x - (x + y) * share) ** 2 / ((x + y) * share * (1 - share))
        degrees += len(large) - 1
    if degrees == 0:
        return 1.0
    half = torch.tensor([degrees / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))
