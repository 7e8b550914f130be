"""sample_recovered in Triton."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec_ops.triton import _chain, _rows
from specdec_ops.triton._chain_arguments import Chain, ChainChecks
from specdec_ops.triton._checks import shape_of
from specdec_ops.triton._filters import FilterArguments


def sample_recovered(
    target_logits: Tensor,
    draft_token_ids: Tensor,
    temperature: Tensor,
    *,
    draft_logits: Tensor | None = None,
    draft_probs: Tensor | None = None,
    draft_logsumexp: Tensor | None = None,
    draft_support_ids: Tensor | None = None,
    draft_support_logprobs: Tensor | None = None,
    draft_temperature: Tensor | None = None,
    has_draft_law: Tensor | None = None,
    seeds: Tensor | None = None,
    positions: Tensor | None = None,
    uniforms: Tensor | None = None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
    draft_top_k: Tensor | None = None,
    draft_top_p: Tensor | None = None,
    draft_min_p: Tensor | None = None,
    draft_thresholds: Tensor | None = None,
    joint_filters: bool = False,
    vocab_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The op of the same name, by its schema."""
    checks = ChainChecks("sample_recovered", target_logits)
    checks.integer(draft_token_ids, "draft_token_ids")
    checks.require(
        draft_token_ids.dim() == 1, f"draft_token_ids must be [num_drafts], got {shape_of(draft_token_ids)}"
    )
    batch = draft_token_ids.shape[0]
    checks.rows(target_logits, "target_logits", "[num_drafts, width]", batch)
    size = checks.vocab_size(vocab_size, target_logits, "target_logits")
    chain = Chain(
        checks, batch, batch, target_logits, size,
        num_entries=batch, most_drafts=1, has_bonus_rows=False, rule=_chain.REJECT_ALL.value,
    )  # fmt: skip
    chain.add("draft_ids", draft_token_ids, _rows.WIDE_DRAFT_IDS.value)
    entries = chain.set_request_indices(None, temperature, "[num_drafts]")
    chain.set_temperature(temperature, entries)
    chain.set_draft_law(
        draft_logits, draft_probs, draft_logsumexp, draft_support_ids, draft_support_logprobs,
        draft_temperature, has_draft_law, entries,
    )  # fmt: skip
    chain.set_filters(
        FilterArguments(
            (top_k, top_p, min_p), (draft_top_k, draft_top_p, draft_min_p), draft_thresholds, joint_filters
        ),
        entries,
    )
    chain.set_seeds(seeds, positions, "[num_drafts]", entries)
    checks.require(seeds is None or uniforms is None, "seeds and uniforms must be at most one, got both")
    if uniforms is not None:
        chain.set_uniforms(
            uniforms, "uniforms", "[num_drafts]", batch, "final_uniforms", _rows.WIDE_FINAL_UNIFORMS.value
        )
    token_ids = draft_token_ids.new_empty(batch)
    status = draft_token_ids.new_empty(batch, dtype=torch.int32)
    chain.run(token_ids, status)
    return token_ids, status
