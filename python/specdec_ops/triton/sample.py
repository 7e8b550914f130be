"""sample in Triton."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec_ops.triton import _rows
from specdec_ops.triton._chain_arguments import Chain, ChainChecks, View
from specdec_ops.triton._checks import name_of, shape_of
from specdec_ops.triton._filters import FilterArguments
from specdec_ops.triton._likeliest import MOST_LISTED
from specdec_ops.triton._rules import set_sampler
from specdec_ops.triton._sparse_sample import draw_from_likeliest


def sample(
    logits: Tensor,
    temperature: Tensor,
    *,
    seeds: Tensor | None = None,
    positions: Tensor | None = None,
    request_indices: Tensor | None = None,
    draft_slot: int | None = None,
    draft_slots: Tensor | None = None,
    uniforms: Tensor | None = None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
    joint_filters: bool = False,
    vocab_size: int | None = None,
    token_dtype: torch.dtype = torch.int64,
    sampler: str = "inverse_cdf",
    law_size: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
    """The op of the same name, by its schema; what has no kernel here raises MissingKernelError."""
    checks = ChainChecks("sample", logits)
    require = checks.require
    require(logits.dim() == 2, f"logits must be [batch, width], got {shape_of(logits)}")
    batch = logits.shape[0]
    checks.rows(logits, "logits", "[batch, width]", batch)
    size = checks.vocab_size(vocab_size, logits, "logits")
    if law_size is not None:
        require(
            1 <= law_size <= MOST_LISTED.value,
            f"law_size must be in [1, {MOST_LISTED.value}], got {law_size}",
        )
        require(sampler == "inverse_cdf", f"sampler must be 'inverse_cdf' with law_size, got {sampler!r}")
    chain = Chain(checks, batch, 0, logits, size, num_entries=batch, most_drafts=0)
    entries = chain.set_request_indices(request_indices, temperature, "[batch]")
    chain.set_temperature(temperature, entries)
    chain.set_filters(FilterArguments((top_k, top_p, min_p), is_joint=joint_filters), entries)
    chain.set_seeds(seeds, positions, "[batch]", entries)
    require(seeds is None or uniforms is None, "seeds and uniforms must be at most one, got both")
    if uniforms is not None:
        chain.set_uniforms(
            uniforms, "uniforms", "[batch]", batch, "final_uniforms", _rows.WIDE_FINAL_UNIFORMS.value
        )
    set_sampler(chain, sampler, uniforms is not None)
    if draft_slot is not None or draft_slots is not None:
        require(uniforms is None, "draft_slot and uniforms must be at most one, got both")
        chain.final_stream = 2
    if draft_slots is not None:
        checks.integer(draft_slots, "draft_slot")
        if draft_slots.dim() > 0:
            checks.vector(draft_slots, "draft_slot", "one integer or [batch]", batch)
            chain.add("final_slots", draft_slots, _rows.WIDE_FINAL_SLOTS.value)
        else:
            chain.add("final_slots", draft_slots.reshape(1), _rows.WIDE_FINAL_SLOTS.value)
            chain.views["final_slots"] = View(draft_slots.data_ptr(), 0)
    if draft_slot is not None:
        require(0 <= draft_slot < 2**31, f"draft_slot must be in [0, 2^31), got {draft_slot}")
        chain.final_slot = draft_slot
    require(
        token_dtype in (torch.int32, torch.int64),
        f"token_dtype must be int32 or int64, got {name_of(token_dtype)}",
    )
    token_ids = logits.new_empty(batch, dtype=token_dtype)
    logprobs = logits.new_empty(batch, dtype=torch.float32)
    logsumexp = logits.new_empty(batch, dtype=torch.float64)
    status = logits.new_empty(batch, dtype=torch.int32)
    if law_size is not None:
        thresholds = logits.new_empty(batch, dtype=torch.float32)
        law = draw_from_likeliest(chain, law_size, token_ids, logprobs, logsumexp, status, thresholds)
        return token_ids, logprobs, logsumexp, status, thresholds, law
    if chain.filters is None:
        thresholds = logits.new_full((batch,), float("-inf"), dtype=torch.float32)
    else:
        thresholds = logits.new_empty(batch, dtype=torch.float32)
        chain.filters.thresholds = thresholds.data_ptr()
    chain.run(token_ids, status, logsumexp=logsumexp, logprobs=logprobs)
    return token_ids, logprobs, logsumexp, status, thresholds, []
