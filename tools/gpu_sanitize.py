"""A few calls of every op on the GPU, small enough for compute-sanitizer."""

from __future__ import annotations

import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import inputs
import specdec_ops
import test_cuda_bookkeeping as bookkeeping
import test_cuda_rows as rows
import torch
from specdec_ops.rules import Lenience, Margin, Thresholds, TopN, Typical

LOSSY_RULES = (Lenience(0.5), Typical(), TopN(), Thresholds(0.3, 0.9), Margin(0.5))


def options(vocab_size: int, arguments: inputs.Arguments) -> list[inputs.Arguments]:
    """Each way of verify_chain that has code of its own."""
    bonus = torch.tensor([3, -1, vocab_size, 0])
    filters = {"top_k": torch.tensor([40, 5000, 0, 3]), "top_p": torch.tensor([0.9, 1.0, 0.97, 0.8])}
    of_drafts = {}
    if "draft_logsumexp" in arguments:
        of_drafts = {"draft_thresholds": torch.zeros(14)}
    elif "draft_logits" in arguments:
        of_drafts = {f"draft_{name}": value for name, value in filters.items()}
    return [
        arguments,
        inputs.without_bonus_rows(arguments, bonus),
        {**arguments, "accept_rates": torch.full((11,), 0.7)},
        {**arguments, "fly_window_size": 2, "fly_entropy_threshold": 0.0},
        {**arguments, **filters, **of_drafts},
        {**arguments, **filters, "filter_order": "joint", "fly_window_size": 2, "fly_entropy_threshold": 0.0},
        {**arguments, "rule": "block"},
        {**arguments, **filters, **of_drafts, "rule": "block"},
        {**arguments, "rule": "exact_match"},
        *({**arguments, "rule": rule} for rule in LOSSY_RULES),
        *({**arguments, **filters, **of_drafts, "rule": rule} for rule in LOSSY_RULES),
        *([{**arguments, "rule": "exact_match", "sampler": "gumbel"}] if "seeds" in arguments else []),
    ]


def run_chain_ops() -> None:
    for seed, law in enumerate(inputs.DRAFT_LAWS):
        for dtype in (torch.bfloat16, torch.float32):
            for uniforms in (False, True):
                chain = inputs.chain(
                    [2, 0, 11, 1], 9001, law, seed=seed, dtype=dtype, noise=0.1, uniforms=uniforms
                )
                kept, _ = inputs.entries(
                    law,
                    indices=[4, 1, 0, 4],
                    counts=[2, 0, 5, 1],
                    max_requests=5,
                    k=5,
                    vocab_size=9001,
                    seed=seed,
                    uniforms=uniforms,
                )
                # As nobody checks them.
                kept["request_indices"][1:3] = torch.tensor([-3, 77])
                for arguments in (*options(9001, chain), kept):
                    moved = {n: v.cuda() if isinstance(v, torch.Tensor) else v for n, v in arguments.items()}
                    for extras in (False, True):
                        out = specdec_ops.verify_chain(
                            **moved,
                            return_logsumexp=extras,
                            return_logprobs=extras,
                            return_accept_probs=extras,
                        )
                    specdec_ops.count_accepted(out.token_ids)
    logits = torch.randn(5, 9001, device="cuda")
    positions = torch.arange(5, device="cuda")
    sampled = specdec_ops.sample(logits, seeds=1, positions=positions)
    indices = torch.tensor([1, -1, 0, 99, 1], device="cuda")
    specdec_ops.sample(
        logits,
        temperature=torch.ones(2, device="cuda"),
        seeds=1,
        positions=positions,
        request_indices=indices,
        draft_slot=positions,
    )
    for filters in ({}, {"top_k": 40, "top_p": 0.9, "draft_top_k": 5000}):
        specdec_ops.sample_recovered(
            logits, sampled.token_ids, draft_logits=logits + 0.1, seeds=1, positions=positions, **filters
        )


def run_bookkeeping() -> None:
    for name, random_arguments in bookkeeping.RANDOM_ARGUMENTS.items():
        for seed in range(10):
            rng = random.Random(seed)
            arguments = random_arguments(rng)
            if seed % 2:  # totals that nobody checked
                for key in bookkeeping.TOTALS:
                    if isinstance(arguments.get(key), torch.Tensor):
                        arguments[key] = bookkeeping.garbage(arguments[key], rng)
            bookkeeping.call(
                name, {n: v.cuda() if isinstance(v, torch.Tensor) else v for n, v in arguments.items()}
            )


def run_row_ops() -> None:
    for name, random_arguments in rows.RANDOM_ARGUMENTS.items():
        for seed in range(10):
            rows.results(name, rows.moved(random_arguments(seed)))


def main() -> None:
    run_chain_ops()
    run_bookkeeping()
    run_row_ops()
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
