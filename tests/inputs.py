"""Random arguments for the ops."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

Arguments = dict[str, Any]
DRAFT_LAWS = ("one_hot", "logits", "logits_and_logsumexp", "probs", "support")


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def strided(values: Tensor, row_gap: int, offset: int = 0, fill: float = 0.0) -> Tensor:
    """The same rows in a wider buffer: a storage offset, and a gap after each row."""
    *rows, width = values.shape
    buffer = torch.full((*rows, width + row_gap + offset), fill, dtype=values.dtype)
    view = buffer[..., offset : offset + width]
    view.copy_(values)
    return view


def logits_of(law: Any, dtype: torch.dtype = torch.float32) -> Tensor:
    """Logits whose softmax is the law, -inf where it is 0."""
    return torch.tensor(law, dtype=torch.float64).log().to(dtype)


def chain(
    counts: list[int],
    vocab_size: int,
    draft_law: str,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    id_dtype: torch.dtype = torch.int64,
    scale: float = 3.0,
    noise: float = 0.6,
    temperature: Tensor | float | None = None,
    draft_temperature: Tensor | float | None = None,
    support: int = 8,
    uniforms: bool = False,
) -> Arguments:
    """Arguments of ``verify_chain``: drafts drawn from a law near the target's."""
    random = generator(seed)
    batch, num_drafts = len(counts), sum(counts)
    cu = torch.tensor([0, *counts]).cumsum(0)
    if temperature is None:
        temperature = 0.5 + torch.rand(batch, generator=random)
    target = scale * torch.randn(num_drafts + batch, vocab_size, generator=random)
    rows = [int(cu[r]) + r + i for r in range(batch) for i in range(counts[r])]
    requests = [r for r in range(batch) for _ in range(counts[r])]
    draft = target[rows] + noise * torch.randn(num_drafts, vocab_size, generator=random)
    target, draft = target.to(dtype), draft.to(dtype)

    own = temperature if draft_temperature is None else draft_temperature
    draft_t = (own[requests] if isinstance(own, Tensor) else torch.full((num_drafts,), float(own))).double()
    scaled = draft.double() / draft_t.clamp(min=1e-3)[:, None]
    arguments: Arguments = {}
    if num_drafts == 0:
        ids = torch.zeros(0, dtype=torch.int64)
        law = scaled
        kept = torch.zeros(0, min(support, vocab_size), dtype=torch.int64)
    else:
        law = scaled.softmax(-1)
        kept = law.topk(min(support, vocab_size), dim=-1).indices
        if draft_law == "support":
            law = torch.zeros_like(law).scatter(1, kept, law.gather(1, kept))
            law = law / law.sum(-1, keepdim=True)
        ids = torch.multinomial(law, 1, generator=random).squeeze(1)
    if draft_law.startswith("logits"):
        arguments["draft_logits"] = draft
    if draft_law == "logits_and_logsumexp":
        arguments["draft_logsumexp"] = scaled.logsumexp(-1)
    if draft_law == "probs":
        arguments["draft_probs"] = law.to(dtype)
    if draft_law == "support":
        arguments["draft_support_ids"] = kept.to(id_dtype)
        arguments["draft_support_logprobs"] = law.gather(1, kept).log().float()
    if uniforms:
        arguments["accept_uniforms"] = torch.rand(num_drafts, generator=random, dtype=torch.float64)
        arguments["recovered_uniforms"] = torch.rand(batch, generator=random, dtype=torch.float64)
    else:
        arguments["seeds"] = torch.randint(-(2**63), 2**63 - 1, (batch,), generator=random)
        arguments["positions"] = torch.randint(0, 2**40, (batch,), generator=random)
    if draft_temperature is not None:
        arguments["draft_temperature"] = draft_temperature
    return {
        "target_logits": target,
        "draft_token_ids": ids.to(id_dtype),
        "cu_num_draft_tokens": cu.to(id_dtype),
        "temperature": temperature,
        **arguments,
    }


def bonus_rows(arguments: Arguments) -> list[int]:
    """The rows of ``target_logits`` that belong to no draft."""
    return [int(end) + r for r, end in enumerate(arguments["cu_num_draft_tokens"][1:])]


def without_bonus_rows(arguments: Arguments, bonus_token_ids: Tensor) -> Arguments:
    """The same chains with bonus tokens that were drawn elsewhere."""
    keep = torch.ones(arguments["target_logits"].shape[0], dtype=torch.bool)
    keep[bonus_rows(arguments)] = False
    return {
        **arguments,
        "target_logits": arguments["target_logits"][keep],
        "bonus_token_ids": bonus_token_ids,
    }


class Entries(NamedTuple):
    """One call of ``verify_chain`` in two ways."""

    #: With what is kept for more requests than are in the batch.
    kept: Arguments
    #: With what was gathered from that.
    gathered: Arguments


#: What ``verify_chain`` finds at a request's index.
KEPT = (
    *("temperature", "draft_temperature", "has_draft_law", "seeds"),
    *("top_k", "top_p", "min_p", "draft_top_k", "draft_top_p", "draft_min_p"),
)
#: What it may find there for each slot.
KEPT_BY_SLOT = (
    "draft_logits",
    "draft_probs",
    "draft_logsumexp",
    "draft_thresholds",
    "draft_support_ids",
    "draft_support_logprobs",
)


def entries(
    draft_law: str,
    *,
    indices: list[int],
    counts: list[int],
    max_requests: int,
    k: int,
    index_dtype: torch.dtype = torch.int64,
    vocab_size: int = 300,
    seed: int = 0,
    uniforms: bool = False,
    spoiled: bool = True,
) -> Entries:
    """Chains of requests whose state is kept in entries; what nobody refers to is no law if ``spoiled``."""
    random = generator(seed)
    every = chain(
        [k] * max_requests,
        vocab_size,
        draft_law,
        seed=seed,
        noise=0.5,
        temperature=torch.tensor([0.7, 0.0, 1.2, 1.0, 0.4]).repeat(max_requests)[:max_requests],
        draft_temperature=torch.linspace(0.8, 1.3, max_requests),
        uniforms=uniforms,
    )
    every["has_draft_law"] = torch.arange(max_requests) % 5 != 3
    rows = [entry * (k + 1) + i for entry, n in zip(indices, counts, strict=True) for i in range(n + 1)]
    drafts = [entry * k + i for entry, n in zip(indices, counts, strict=True) for i in range(n)]
    common: Arguments = {
        "target_logits": every["target_logits"][rows],
        "draft_token_ids": every["draft_token_ids"][drafts],
        "cu_num_draft_tokens": torch.tensor([0, *counts]).cumsum(0),
        "max_num_draft_tokens": k,
    }
    if uniforms:
        common["accept_uniforms"] = every["accept_uniforms"][drafts]
        common["recovered_uniforms"] = every["recovered_uniforms"][indices]
    else:
        common["positions"] = torch.randint(0, 2**40, (len(indices),), generator=random)
    gathered = common | {name: every[name][indices] for name in KEPT if name in every}
    gathered |= {name: every[name][drafts] for name in KEPT_BY_SLOT if name in every}
    kept = common | {name: every[name].clone() for name in KEPT if name in every}
    kept |= {
        name: every[name].unflatten(0, (max_requests, k)).clone() for name in KEPT_BY_SLOT if name in every
    }
    if spoiled:
        unused = [entry for entry in range(max_requests) if entry not in indices]
        used = torch.zeros(max_requests, k, dtype=torch.bool)
        for entry, n in zip(indices, counts, strict=True):
            used[entry, :n] = True
        kept["temperature"][unused] = torch.nan
        for name in KEPT_BY_SLOT:
            if name in kept:
                kept[name][~used] = torch.nan if kept[name].is_floating_point() else -(2**31)
    kept["request_indices"] = torch.tensor(indices, dtype=index_dtype)
    return Entries(kept, gathered)


def select_requests(arguments: Arguments, order: list[int]) -> Arguments:
    """The arguments of these requests alone, in this order."""
    cu = arguments["cu_num_draft_tokens"].tolist()
    drafts = [d for r in order for d in range(cu[r], cu[r + 1])]
    rows = [row + r for r in order for row in range(cu[r], cu[r + 1] + 1)]
    if arguments.get("bonus_token_ids") is not None:
        rows = drafts
    counts = [cu[r + 1] - cu[r] for r in order]
    index = {"target_logits": rows}
    for name in (
        "temperature",
        "draft_temperature",
        "has_draft_law",
        "seeds",
        "positions",
        "recovered_uniforms",
        "bonus_token_ids",
    ):
        index[name] = order
    for name in (
        "draft_token_ids",
        "draft_logits",
        "draft_probs",
        "draft_logsumexp",
        "draft_support_ids",
        "draft_support_logprobs",
        "accept_uniforms",
    ):
        index[name] = drafts
    selected = {
        name: value[index[name]] if isinstance(value, Tensor) and name in index else value
        for name, value in arguments.items()
    }
    selected["cu_num_draft_tokens"] = (
        torch.tensor([0, *counts]).cumsum(0).to(arguments["cu_num_draft_tokens"].dtype)
    )
    return selected
