"""verify_chain in Triton."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec_ops.triton import _chain, _rows
from specdec_ops.triton._chain_arguments import Chain, ChainChecks
from specdec_ops.triton._checks import shape_of
from specdec_ops.triton._filters import FilterArguments
from specdec_ops.triton._rules import looks_at_draft_laws, set_fly, set_rule, set_sampler


def verify_chain(
    target_logits: Tensor,
    draft_token_ids: Tensor,
    cu_num_draft_tokens: Tensor,
    temperature: Tensor,
    max_num_draft_tokens: int,
    draft_logits: Tensor | None = None,
    draft_probs: Tensor | None = None,
    draft_logsumexp: Tensor | None = None,
    draft_support_ids: Tensor | None = None,
    draft_support_logprobs: Tensor | None = None,
    draft_temperature: Tensor | None = None,
    has_draft_law: Tensor | None = None,
    seeds: Tensor | None = None,
    positions: Tensor | None = None,
    request_indices: Tensor | None = None,
    accept_uniforms: Tensor | None = None,
    recovered_uniforms: Tensor | None = None,
    bonus_token_ids: Tensor | None = None,
    accept_rates: Tensor | None = None,
    fly_window_size: int | None = None,
    fly_entropy_threshold: float = 0.3,
    fly_entropy_top_k: int = 3,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
    draft_top_k: Tensor | None = None,
    draft_top_p: Tensor | None = None,
    draft_min_p: Tensor | None = None,
    draft_thresholds: Tensor | None = None,
    joint_filters: bool = False,
    vocab_size: int | None = None,
    return_logsumexp: bool = False,
    return_logprobs: bool = False,
    return_accept_probs: bool = False,
    rule: str = "token",
    rule_parameters: Sequence[float] = (),
    rule_mask: Tensor | None = None,
    sampler: str = "inverse_cdf",
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """The op of the same name, by its schema."""
    checks = ChainChecks("verify_chain", target_logits)
    require = checks.require
    checks.integer(cu_num_draft_tokens, "cu_num_draft_tokens")
    require(
        cu_num_draft_tokens.dim() == 1 and cu_num_draft_tokens.shape[0] >= 1,
        f"cu_num_draft_tokens must be [batch + 1], got {shape_of(cu_num_draft_tokens)}",
    )
    batch = cu_num_draft_tokens.shape[0] - 1
    checks.integer(draft_token_ids, "draft_token_ids")
    require(
        draft_token_ids.dim() == 1, f"draft_token_ids must be [num_drafts], got {shape_of(draft_token_ids)}"
    )
    num_drafts = draft_token_ids.shape[0]
    has_bonus_rows = bonus_token_ids is None
    num_rows = num_drafts + (batch if has_bonus_rows else 0)
    checks.rows(
        target_logits,
        "target_logits",
        "[num_drafts + batch, width]" if has_bonus_rows else "[num_drafts, width]",
        num_rows,
    )
    size = checks.vocab_size(vocab_size, target_logits, "target_logits")
    require(
        0 <= max_num_draft_tokens < 2**31 - 1,
        f"max_num_draft_tokens must be in [0, 2^31 - 1), got {max_num_draft_tokens}",
    )

    width = max_num_draft_tokens + 1
    chain = Chain(
        checks, batch, num_drafts, target_logits, size,
        num_entries=batch, most_drafts=max_num_draft_tokens, width=width, wave=8,
        has_bonus_rows=has_bonus_rows,
    )  # fmt: skip
    chain.add("cu", cu_num_draft_tokens, _rows.WIDE_CU.value)
    chain.add("draft_ids", draft_token_ids, _rows.WIDE_DRAFT_IDS.value)
    if bonus_token_ids is not None:
        checks.integer(bonus_token_ids, "bonus_token_ids")
        checks.vector(bonus_token_ids, "bonus_token_ids", "[batch]", batch)
        chain.add("bonus_ids", bonus_token_ids, _rows.WIDE_BONUS_IDS.value)
    require(
        accept_rates is None or fly_window_size is None,
        "accept_rates and fly_window_size must be at most one, got both",
    )
    require(
        rule == "token" or (accept_rates is None and fly_window_size is None),
        f"rule must be 'token' with accept_rates or fly_window_size, got '{rule}'",
    )
    set_rule(chain, rule, rule_parameters, rule_mask)
    set_sampler(chain, sampler, accept_uniforms is not None)
    require(
        sampler == "inverse_cdf" or rule == "exact_match",
        f"sampler must be 'inverse_cdf' unless rule is 'exact_match', got '{sampler}'",
    )
    if accept_rates is not None:
        checks.real(accept_rates, "accept_rates")
        elements = "element" if max_num_draft_tokens == 1 else "elements"
        require(
            accept_rates.dim() == 1 and accept_rates.shape[0] >= max_num_draft_tokens,
            f"accept_rates must be [slots] with at least max_num_draft_tokens = {max_num_draft_tokens} "
            f"{elements}, got {shape_of(accept_rates)}",
        )
        chain.rule = _chain.SYNTHETIC.value
        chain.add("rates", accept_rates, _rows.WIDE_RATES.value)
    if fly_window_size is not None:
        set_fly(chain, fly_window_size, fly_entropy_threshold, fly_entropy_top_k)
    entries = chain.set_request_indices(request_indices, temperature, "[batch]", max_num_draft_tokens)
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
    if not looks_at_draft_laws(chain, return_accept_probs):
        chain.leave_out_draft_law()
    chain.set_seeds(seeds, positions, "[batch]", entries)
    require(
        (accept_uniforms is None) == (recovered_uniforms is None),
        "accept_uniforms and recovered_uniforms must be given together, got one",
    )
    require(
        seeds is None or accept_uniforms is None, "seeds and accept_uniforms must be at most one, got both"
    )
    if accept_uniforms is not None and recovered_uniforms is not None:
        chain.set_uniforms(
            accept_uniforms, "accept_uniforms", "[num_drafts]", num_drafts,
            "accept_uniforms", _rows.WIDE_ACCEPT_UNIFORMS.value,
        )  # fmt: skip
        chain.set_uniforms(
            recovered_uniforms, "recovered_uniforms", "[batch]", batch,
            "final_uniforms", _rows.WIDE_FINAL_UNIFORMS.value,
        )  # fmt: skip
    require(
        accept_rates is None or chain.numbers != _chain.NO_NUMBERS.value or num_drafts == 0,
        "seeds and positions, or accept_uniforms and recovered_uniforms, must be given with accept_rates, "
        "got neither",
    )

    token_ids = draft_token_ids.new_empty((batch, width))
    num_accepted = draft_token_ids.new_empty(batch, dtype=torch.int32)
    status = draft_token_ids.new_empty(batch, dtype=torch.int32)
    logsumexp = target_logits.new_empty(num_rows, dtype=torch.float64) if return_logsumexp else None
    logprobs = target_logits.new_empty((batch, width), dtype=torch.float32) if return_logprobs else None
    accept_probs = target_logits.new_empty(num_drafts, dtype=torch.float32) if return_accept_probs else None
    chain.run(token_ids, status, num_accepted, logsumexp, logprobs, accept_probs)
    extras = [extra for extra in (logsumexp, logprobs, accept_probs) if extra is not None]
    return token_ids, num_accepted, status, extras
