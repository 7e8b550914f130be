"""Random calls of the chain ops, of all kinds that an engine can make, for comparisons bit by bit."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

import filtering
import inputs
import torch
from specdec_ops.rules import Lenience, Margin, Thresholds, TopN, Typical
from torch import Tensor

INF, NAN = float("inf"), float("nan")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
EXTRAS = {"return_logsumexp": True, "return_logprobs": True, "return_accept_probs": True}
PER_REQUEST = (
    *("temperature", "draft_temperature", "has_draft_law", "seeds", "positions"),
    *(prefix + name for prefix in ("", "draft_") for name in filtering.NAMES),
)
#: Around the sizes of lanes, octets, chunks and blocks; two of real models.
VOCAB_SIZES = (1, 2, 7, 8, 33, 64, 255, 256, 257, 1000, 4095, 4096, 4097, 8192, 9001, 32_000, 151_936)


def spoil(values: Tensor, choice: random.Random) -> None:
    """Puts what is not a law into a few rows."""
    for row in range(values.shape[0]):
        if choice.random() > 0.15:
            continue
        where = choice.randrange(values.shape[1])
        kind = choice.randrange(6)
        if kind == 0:
            values[row] = -INF
        elif kind == 1:
            values[row] = NAN
        elif kind == 2:
            values[row] = -INF
            values[row, where] = 1.0
        else:
            values[row, where] = (INF, NAN, -INF)[kind - 3]


def random_chain(
    seed: int, lengths: Sequence[int] = (0, 1, 2, 3, 4, 5, 9), vocab_sizes: Sequence[int] = VOCAB_SIZES
) -> tuple[inputs.Arguments, dict[str, Any], str]:
    """Arguments of verify_chain, flags, and what they are."""
    choice = random.Random(seed)
    vocab_size = choice.choice(vocab_sizes)
    batch = choice.randint(1, 3 if vocab_size > 10_000 else 24)
    counts = [choice.choice(lengths) for _ in range(batch)]
    law = choice.choice(inputs.DRAFT_LAWS)
    dtype = choice.choice(DTYPES)
    uniforms = choice.random() < 0.3
    arguments = inputs.chain(
        counts,
        vocab_size,
        law,
        seed=seed,
        dtype=dtype,
        id_dtype=choice.choice((torch.int32, torch.int64)),
        scale=choice.choice((0.1, 3.0, 3.0, 12.0)),
        noise=choice.choice((0.05, 0.6, 3.0)),
        draft_temperature=choice.choice((None, None, 0.7)) if batch else None,
        uniforms=uniforms,
    )
    if isinstance(arguments.get("draft_temperature"), float):
        arguments["draft_temperature"] = torch.full((batch,), arguments["draft_temperature"])
        arguments["draft_temperature"][choice.randrange(batch)] = 0.0
    for r in range(batch):
        if choice.random() < 0.25:
            arguments["temperature"][r] = choice.choice((0.0, NAN, INF, 1e-4, 5.0))
    if law == "logits" and choice.random() < 0.3:
        arguments["draft_logits"] = arguments["draft_logits"].to(choice.choice(DTYPES))
    if choice.random() < 0.2:
        arguments["has_draft_law"] = torch.rand(batch, generator=inputs.generator(seed)) < 0.7
    if choice.random() < 0.3:
        spoil(arguments["target_logits"], choice)
    if choice.random() < 0.2 and "draft_logits" in arguments:
        spoil(arguments["draft_logits"], choice)
    if choice.random() < 0.2 and "draft_probs" in arguments:
        spoil(arguments["draft_probs"], choice)
    ids = arguments["draft_token_ids"]
    for i in range(ids.shape[0]):
        if choice.random() < 0.05:
            ids[i] = choice.choice((-1, -7, vocab_size, vocab_size + 5))
    if vocab_size > 2 and choice.random() < 0.3:
        arguments["vocab_size"] = vocab_size - choice.randint(1, min(vocab_size - 1, 300))
    # Without them decisions may be taken from fewer digits.
    any_flag = choice.random() < 0.4
    flags = {name: any_flag and choice.random() < 0.5 for name in EXTRAS}
    return arguments, flags, f"seed {seed}, V {vocab_size}, {law}, {dtype}, uniforms {uniforms}, {flags}"


def near_laws(law: str, seed: int, *, noise: float, uniforms: bool = False) -> inputs.Arguments:
    """Chains whose last draft is out of the question, so that block verification looks at those before it."""
    counts = [3, 2, 4, 9] * 3
    arguments = inputs.chain(counts, 300, law, seed=seed, noise=noise, uniforms=uniforms)
    rows = arguments["draft_probs" if law == "probs" else "draft_logits"]
    for r, end in enumerate(arguments["cu_num_draft_tokens"][1:].tolist()):
        # An id that neither law would miss.
        x = int(rows[end - 1].argmin())
        arguments["draft_token_ids"][end - 1] = x
        arguments["target_logits"][end - 1 + r, x] -= 30.0
    return arguments


def add_bonus_token_ids(arguments: inputs.Arguments, choice: random.Random) -> None:
    vocab_size = arguments["target_logits"].shape[1]
    batch = arguments["temperature"].shape[0]
    ids = [choice.choice((-1, -5, vocab_size, *4 * (choice.randrange(vocab_size),))) for _ in range(batch)]
    dtype = choice.choice((torch.int32, torch.int64))
    arguments.update(inputs.without_bonus_rows(arguments, torch.tensor(ids, dtype=dtype)))


def add_accept_rates(arguments: inputs.Arguments, choice: random.Random) -> None:
    most = int(arguments["cu_num_draft_tokens"].diff().max())
    rates = [choice.choice((0.0, 0.3, 0.8, 0.95, 1.0)) for _ in range(most + choice.randrange(3))]
    arguments["accept_rates"] = torch.tensor(rates, dtype=choice.choice((torch.float32, torch.float64)))


def add_fly(arguments: inputs.Arguments, choice: random.Random) -> None:
    arguments["fly_window_size"] = choice.choice((1, 1, 2, 3, 8, 13))
    arguments["fly_entropy_threshold"] = choice.choice((0.0, 0.0, 0.1, 0.7))
    arguments["fly_entropy_top_k"] = choice.choice((1, 2, 5, 31, 32, 33, 64))
    # Drafts of greedy requests that are seldom wrong.
    best = arguments["target_logits"].float().nan_to_num(-INF).argmax(-1)
    cu = arguments["cu_num_draft_tokens"].tolist()
    for r in (arguments["temperature"] == 0.0).nonzero().flatten().tolist():
        for draft in range(cu[r], cu[r + 1]):
            if choice.random() < 0.8:
                arguments["draft_token_ids"][draft] = best[draft + r]


def add_block(arguments: inputs.Arguments, choice: random.Random) -> None:
    arguments["rule"] = "block"


def add_exact_match(arguments: inputs.Arguments, choice: random.Random) -> None:
    """With drafts that are often right."""
    arguments["rule"] = "exact_match"
    if "seeds" in arguments and choice.random() < 0.6:
        arguments["sampler"] = "gumbel"
    best = arguments["target_logits"].float().nan_to_num(-INF).argmax(-1)
    cu = arguments["cu_num_draft_tokens"].tolist()
    for r, (begin, end) in enumerate(itertools.pairwise(cu)):
        for draft in range(begin, end):
            if choice.random() < 0.8:
                arguments["draft_token_ids"][draft] = best[draft + r]


def add_lossy_rule(arguments: inputs.Arguments, choice: random.Random) -> None:
    """With drafts that are often among the most probable ids, and slots where the rule gives way."""
    rules = (
        Lenience(choice.choice((0.1, 0.5, 0.9, 1.0))),
        Typical(choice.choice((0.0, 0.05, 0.3)), choice.choice((0.0, 0.1, 0.3, 1.0))),
        TopN(choice.choice((1, 2, 3, 40)), choice.choice((0.01, 0.1, 0.5, 1.0))),
        Thresholds(choice.choice((0.0, 0.1, 0.3, 1.0)), choice.choice((0.3, 0.8, 1.0))),
        Margin(choice.choice((0.0, 0.5, 0.9, 0.99))),
    )
    arguments["rule"] = choice.choice(rules)
    rows, ids = arguments["target_logits"], arguments["draft_token_ids"]
    size = arguments.get("vocab_size", rows.shape[1])
    cu = arguments["cu_num_draft_tokens"].tolist()
    for r, (begin, end) in enumerate(itertools.pairwise(cu)):
        for draft in range(begin, end):
            if choice.random() < 0.7:
                row = rows[draft + r, :size].float().nan_to_num(-INF)
                ids[draft] = row.topk(min(3, size)).indices[choice.randrange(min(3, size))]
    if choice.random() < 0.5:
        arguments["rule_mask"] = torch.tensor([choice.random() < 0.7 for _ in ids], dtype=torch.bool)


def keep_in_entries(arguments: inputs.Arguments, choice: random.Random) -> None:
    """What belongs to requests among that of others, out of order; draft laws too, or not."""
    batch, cu = arguments["temperature"].shape[0], arguments["cu_num_draft_tokens"].tolist()
    max_requests = batch + choice.randrange(4)
    indices = choice.sample(range(max_requests), batch)
    for name in inputs.KEPT:
        if isinstance(arguments.get(name), Tensor):
            kept = torch.zeros(max_requests, dtype=arguments[name].dtype)
            kept[indices] = arguments[name]
            arguments[name] = kept
    if choice.random() < 0.7:
        counts = [end - begin for begin, end in itertools.pairwise(cu)]
        places = [(entry, i) for entry, n in zip(indices, counts, strict=True) for i in range(n)]
        k = max(counts) + choice.randrange(2)
        for name in inputs.KEPT_BY_SLOT:
            if name in arguments:
                law = arguments[name]
                kept = torch.full((max_requests, k, *law.shape[1:]), -1, dtype=law.dtype)
                for draft, place in enumerate(places):
                    kept[place] = law[draft]
                arguments[name] = kept
    arguments["request_indices"] = torch.tensor(indices, dtype=choice.choice((torch.int32, torch.int64)))


def add_filters(arguments: inputs.Arguments, choice: random.Random) -> None:
    """Filters for the target, for the drafts, or both; drafts that often pass them."""
    if choice.random() < 0.9:
        filtering.add_filters(arguments, choice)
    draft, ids = arguments.get("draft_logits"), arguments["draft_token_ids"]
    if draft is not None and "draft_logsumexp" not in arguments and choice.random() < 0.6:
        filtering.add_filters(arguments, choice, "draft_")
    elif draft is not None and choice.random() < 0.6:
        quantiles = [draft[i].float().nan_to_num(0.0).quantile(choice.random()) for i in range(len(draft))]
        arguments["draft_thresholds"] = torch.tensor(quantiles)
        arguments["draft_thresholds"][torch.rand(len(draft)) < 0.2] = choice.choice((-INF, INF, NAN))
    likely = arguments["target_logits"] if draft is None or choice.random() < 0.3 else draft
    size = arguments.get("vocab_size", likely.shape[1])
    for i in range(ids.shape[0]):
        if choice.random() < 0.5:
            ids[i] = likely[i, :size].float().nan_to_num(-INF).argmax()


FILTERS = {
    "filters": (add_filters,),
    "filters, fly": (add_fly, add_filters),
    "filters, accept_rates, bonus_token_ids": (add_filters, add_accept_rates, add_bonus_token_ids),
    "request_indices, filters": (add_filters, keep_in_entries),
    "request_indices, filters, fly, bonus_token_ids": (
        add_fly,
        add_filters,
        add_bonus_token_ids,
        keep_in_entries,
    ),
}
OPTIONS = {
    "request_indices": (keep_in_entries,),
    "request_indices, accept_rates, bonus_token_ids": (
        add_accept_rates,
        add_bonus_token_ids,
        keep_in_entries,
    ),
    "request_indices, fly": (add_fly, keep_in_entries),
    "request_indices, block": (add_block, keep_in_entries),
    "request_indices, exact_match": (add_exact_match, keep_in_entries),
    "bonus_token_ids": (add_bonus_token_ids,),
    "block": (add_block,),
    "exact_match": (add_exact_match,),
    "bonus_token_ids, block": (add_block, add_bonus_token_ids),
    "bonus_token_ids, exact_match": (add_exact_match, add_bonus_token_ids),
    "accept_rates": (add_accept_rates,),
    "fly": (add_fly,),
    "bonus_token_ids, accept_rates": (add_accept_rates, add_bonus_token_ids),
    "bonus_token_ids, fly": (add_fly, add_bonus_token_ids),
    **FILTERS,
    "lossy": (add_lossy_rule,),
    "bonus_token_ids, lossy": (add_lossy_rule, add_bonus_token_ids),
    "request_indices, lossy": (add_lossy_rule, keep_in_entries),
    "filters, lossy": (add_filters, add_lossy_rule),
    "request_indices, filters, lossy, bonus_token_ids": (
        add_filters,
        add_lossy_rule,
        add_bonus_token_ids,
        keep_in_entries,
    ),
    "filters, block": (add_filters, add_block),
    "filters, exact_match": (add_filters, add_exact_match),
    "request_indices, filters, block, bonus_token_ids": (
        add_filters,
        add_block,
        add_bonus_token_ids,
        keep_in_entries,
    ),
}


def random_chain_with(
    option: str, seed: int, vocab_sizes: Sequence[int] = VOCAB_SIZES
) -> tuple[inputs.Arguments, dict[str, Any], str]:
    """Like random_chain, with an option, and chains longer than what is judged at once."""
    arguments, flags, context = random_chain(seed, (0, 1, 2, 4, 7, 8, 9, 20), vocab_sizes)
    choice = random.Random(seed)
    if choice.random() < 0.4:
        batch = arguments["temperature"].shape[0]
        arguments["temperature"][torch.rand(batch, generator=inputs.generator(seed)) < 0.5] = 0.0
    for add in OPTIONS[option]:
        add(arguments, choice)
    return arguments, flags, f"{option}, {context}"


def for_sample(
    seed: int, vocab_sizes: Sequence[int] = VOCAB_SIZES, *, filters: bool = False, law: bool = False
) -> tuple[inputs.Arguments, str]:
    """Arguments of sample, and what they are."""
    choice = random.Random(seed)
    chain, _, context = random_chain(seed, vocab_sizes=vocab_sizes)
    logits = chain["target_logits"]
    batch = logits.shape[0]
    draw = inputs.generator(seed)
    arguments: inputs.Arguments = {
        "logits": logits,
        "temperature": torch.rand(batch, generator=draw) * (torch.rand(batch, generator=draw) < 0.8),
    }
    if choice.random() < 0.3:
        arguments["uniforms"] = torch.rand(batch, generator=draw, dtype=torch.float64)
    else:
        arguments["seeds"] = torch.randint(-(2**63), 2**63 - 1, (batch,), generator=draw)
        arguments["positions"] = torch.randint(0, 2**40, (batch,), generator=draw)
        slots = torch.tensor([choice.randrange(9) for _ in range(batch)], dtype=torch.int32)
        arguments["draft_slot"] = choice.choice((None, 0, 3, torch.tensor(3), slots))
        if choice.random() < 0.3:
            arguments["sampler"] = "gumbel"
    if filters:
        arguments["logits"] = filtering.rows(choice, batch, logits.shape[1], logits.dtype)
        filtering.add_filters(arguments, choice)
        if choice.random() < 0.2:
            spoil(arguments["logits"], choice)
    if choice.random() < 0.4:
        indices = [choice.randrange(-1, batch) for _ in range(batch)]
        arguments["request_indices"] = torch.tensor(indices, dtype=choice.choice((torch.int32, torch.int64)))
    if law:
        arguments.pop("sampler", None)
        arguments["law_size"] = choice.choice((1, 2, 7, 32, 33, 64))
        arguments["token_dtype"] = choice.choice((torch.int32, torch.int64))
    return arguments, context


def for_sample_recovered(
    seed: int, vocab_sizes: Sequence[int] = VOCAB_SIZES, *, filters: bool = False
) -> tuple[inputs.Arguments, str]:
    """Arguments of sample_recovered, and what they are."""
    chain, _, context = random_chain(seed, vocab_sizes=vocab_sizes)
    if filters:
        add_filters(chain, random.Random(seed))
    counts = chain["cu_num_draft_tokens"].diff().tolist()
    owners = [r for r, count in enumerate(counts) for _ in range(count)]
    arguments = {
        name: value[owners] if name in PER_REQUEST else value
        for name, value in chain.items()
        if name not in ("cu_num_draft_tokens", "accept_uniforms", "recovered_uniforms")
    }
    # Row r of a request's drafts lies behind the bonus rows of r requests.
    arguments["target_logits"] = chain["target_logits"][[draft + r for draft, r in enumerate(owners)]]
    if "recovered_uniforms" in chain:
        arguments["uniforms"] = chain["recovered_uniforms"][owners]
    return arguments, context
