"""What the two ways to verify given probabilities or argmaxes have in common."""

from __future__ import annotations

from torch import Tensor

from specdec_ops.triton._checks import Checks, count_of, shape_of

#: Requests of a program.
REQUESTS = 32


def bonus_tokens(checks: Checks, bonus_token_ids: Tensor) -> int:
    """Checks ``[batch]`` or ``[batch, 1]``, either way the ids of the batch in a row; returns the batch."""
    checks.integer(bonus_token_ids, "bonus_token_ids")
    dims = bonus_token_ids.dim()
    if dims != 1 and not (dims == 2 and bonus_token_ids.shape[1] == 1):
        checks.fail(f"bonus_token_ids must be [batch] or [batch, 1], got {shape_of(bonus_token_ids)}")
    return bonus_token_ids.shape[0]


def verified_rows(
    checks: Checks,
    cu_num_draft_tokens: Tensor,
    batch: int,
    is_greedy: Tensor | None,
    accept_rates: Tensor | None,
    token_ids: Tensor,
) -> tuple[Tensor, int]:
    """One past the last draft of each request, and the drafts of a request that the outputs have room for."""
    checks.integer(token_ids, "token_ids")
    if token_ids.dim() != 2 or token_ids.shape[0] < batch:
        rows = count_of(batch, "row")
        checks.fail(f"token_ids must be [batch, k + 1] with at least {rows}, got {shape_of(token_ids)}")
    ends = checks.draft_ends(cu_num_draft_tokens, batch)
    if token_ids.shape[1] == 0 and batch > 0:
        checks.fail(
            "token_ids must have a column for each draft of a request and one more, got "
            f"{shape_of(token_ids)} for a request with 0 drafts"
        )
    max_num_drafts = token_ids.shape[1] - 1
    if is_greedy is not None:
        checks.bools_from(is_greedy, "is_greedy", "[batch]", batch)
    if accept_rates is not None:
        checks.real(accept_rates, "accept_rates")
        if accept_rates.dim() != 1:
            checks.fail(
                "accept_rates must be [k] with a rate for each draft of a request, got "
                f"{shape_of(accept_rates)} for a request with 0 drafts"
            )
        max_num_drafts = min(max_num_drafts, accept_rates.shape[0])
    return ends, max_num_drafts
