"""token_logprobs: log-probabilities of tokens, their ranks, and the likeliest ids beside them."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from specdec_ops import _reference
from specdec_ops._library import define
from specdec_ops._status import Status
from specdec_ops.ops._arguments import draft_totals, leading_size, per_request


class TokenLogprobsOutput(NamedTuple):
    """What ``token_logprobs`` returns. The first three are laid out as in vLLM's ``LogprobsTensors``."""

    #: ``[num_rows, 1 + top_n]``, dtype of ``token_ids``: the row's token, then the likeliest ids.
    token_ids: Tensor
    #: ``[num_rows, 1 + top_n]`` float32, their log-probabilities in nats.
    logprobs: Tensor
    #: ``[num_rows]`` int64: how many ids are at least as likely as the token, itself among them. So the
    #: likeliest has rank 1, and of n equally likely ones each has rank n.
    ranks: Tensor
    #: ``[num_rows]`` int32, values of :class:`specdec_ops.Status`.
    status: Tensor
    #: ``[batch + 1]`` int32, running totals of the tokens of each request; None without
    #: ``cu_num_draft_tokens``.
    cu_num_tokens: Tensor | None


def token_logprobs(
    logits: Tensor,
    token_ids: Tensor,
    *,
    top_n: int = 0,
    temperature: Tensor | float = 1.0,
    cu_num_draft_tokens: Tensor | None = None,
    vocab_size: int | None = None,
) -> TokenLogprobsOutput:
    """Log-probabilities and ranks of tokens, and the ``top_n`` likeliest ids of each row, without a sort.

    For a token in each row, or for what ``verify_chain`` emitted: then ``token_ids`` is its output,
    ``logits`` are the rows that it was given, and the outputs have a row for each emitted token, request by
    request, and rows of nothing behind the last, as many as ``logits`` in all. Request r's tokens are rows
    ``cu_num_tokens[r]`` to ``cu_num_tokens[r + 1]``; that of slot i is about row
    ``cu_num_draft_tokens[r] + r + i`` of the logits.

    Log-probabilities are those of the rows as they are given: hand over raw or processed logits, as the
    engine reports them, and the temperature if it counts as part of the processing.

    Args:
        logits: ``[rows, width]`` float32, bfloat16 or float16, any row stride; with ``cu_num_draft_tokens``
            ``[num_drafts + batch, width]``.
        token_ids: ``[rows]`` int32 or int64, any strides: -1 is no token, and its row is not read. With
            ``cu_num_draft_tokens``: ``[batch, k + 1]``; a request's tokens are those before its first
            negative id.
        top_n: How many of the likeliest ids are listed, 0 (the default) to 64, at most ``vocab_size``. Equal
            logits are listed by rising id.
        temperature: ``[rows]``, or with ``cu_num_draft_tokens`` ``[batch]``, float32, or a number for all;
            default 1. Below 1e-5 (and NaN), the log-probabilities are those at temperature 1.
        cu_num_draft_tokens: ``[batch + 1]`` or ``[batch]`` int32 or int64, running totals of each request's
            drafts.
        vocab_size: Columns from here on are padding and do not count. Default: the width.

    Returns:
        A :class:`TokenLogprobsOutput`. Rows of nothing hold ids of -1, NaN, and rank 0. A row with a NaN or
        +inf, and a fully masked one, has log-probabilities of NaN; ranks and listed ids are those of its
        logits, where NaN is listed last and is at least as large as nothing. ``status`` tells. A token
        outside ``[0, vocab_size)`` has NaN and rank 0, and the status ``INVALID_DRAFT_ID``. A masked id has
        ``-inf``.

    Raises:
        RuntimeError: An argument has the wrong shape, dtype, device or range; the message names it.

    Source: the log-softmax; layout and ranks as vLLM returns them.

    Example:
        >>> import torch, specdec_ops
        >>> logits = torch.tensor([[0.5, 0.125, 0.25, 0.125]]).log()
        >>> out = specdec_ops.token_logprobs(logits, torch.tensor([3]), top_n=2)
        >>> out.token_ids.tolist(), out.ranks.tolist()
        ([[3, 0, 2]], [4])
    """
    entries = leading_size("token_logprobs", "token_ids", token_ids)
    ids, logprobs, ranks, status, totals = _op(
        logits,
        token_ids,
        per_request(temperature, entries, torch.float32, logits),
        top_n=top_n,
        cu_num_draft_tokens=cu_num_draft_tokens,
        vocab_size=vocab_size,
    )
    return TokenLogprobsOutput(ids, logprobs, ranks, status, totals[0] if totals else None)


def _fake(
    logits: Tensor,
    token_ids: Tensor,
    temperature: Tensor,
    *,
    top_n: int = 0,
    cu_num_draft_tokens: Tensor | None = None,
    vocab_size: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
    rows = logits.shape[0]
    totals = []
    if cu_num_draft_tokens is not None:
        totals.append(logits.new_empty(token_ids.shape[0] + 1, dtype=torch.int32))
    return (
        logits.new_empty((rows, 1 + top_n), dtype=token_ids.dtype),
        logits.new_empty((rows, 1 + top_n), dtype=torch.float32),
        logits.new_empty(rows, dtype=torch.int64),
        logits.new_empty(rows, dtype=torch.int32),
        totals,
    )


def _reference_token_logprobs(
    logits: Tensor,
    token_ids: Tensor,
    temperature: Tensor,
    *,
    top_n: int = 0,
    cu_num_draft_tokens: Tensor | None = None,
    vocab_size: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
    size = logits.shape[1] if vocab_size is None else vocab_size
    # The row of the logits, the token, and whose temperature.
    tokens: list[tuple[int, int, int]] = []
    totals = []
    if cu_num_draft_tokens is None:
        tokens = [(row if token != -1 else -1, token, row) for row, token in enumerate(token_ids.tolist())]
    else:
        begins = draft_totals(cu_num_draft_tokens, token_ids.shape[0])
        ends = [0]
        for r, emitted in enumerate(token_ids.tolist()):
            for slot, token in enumerate(emitted[: begins[r + 1] - begins[r] + 1]):
                if token < 0:
                    break
                tokens.append((begins[r] + r + slot, token, r))
            ends.append(len(tokens))
        totals.append(logits.new_tensor(ends, dtype=torch.int32))
        tokens += [(-1, -1, -1)] * (logits.shape[0] - len(tokens))
    ids, logprobs, ranks, statuses = [], [], [], []
    for row, token, entry in tokens:
        if row < 0:
            ids.append([-1] * (1 + top_n))
            logprobs.append([math.nan] * (1 + top_n))
            ranks.append(0)
            statuses.append(int(Status.OK))
            continue
        t = float(temperature[entry])
        t = t if t >= _reference.GREEDY_TEMPERATURE else 1.0
        law = _reference.read_row(logits[row], t, size)
        x = logits[row, :size].detach().to("cpu", torch.float64).numpy()
        is_id = 0 <= token < size
        status = law.status if law.status != Status.OK or is_id else Status.INVALID_DRAFT_ID
        # A stable sort by falling logit, NaN last.
        listed = np.argsort(np.where(np.isnan(x), np.inf, -x), kind="stable")
        listed = np.concatenate([listed[~np.isnan(x[listed])], listed[np.isnan(x[listed])]])[:top_n]
        ids.append([token, *listed.tolist()])
        usable = law.status == Status.OK
        with np.errstate(invalid="ignore"):
            scaled = np.where(np.isneginf(x), x, x / t)
        logprobs.append(
            [float(scaled[i]) - law.logsumexp if usable and 0 <= i < size else math.nan for i in ids[-1]]
        )
        ranks.append(int((x >= x[token]).sum()) if is_id else 0)
        statuses.append(int(status))
    shape = (logits.shape[0], 1 + top_n)
    return (
        logits.new_tensor(ids, dtype=token_ids.dtype).reshape(shape),
        logits.new_tensor(logprobs, dtype=torch.float32).reshape(shape),
        logits.new_tensor(ranks, dtype=torch.int64),
        logits.new_tensor(statuses, dtype=torch.int32),
        totals,
    )


_op = define(
    "token_logprobs(Tensor logits, Tensor token_ids, Tensor temperature, *, SymInt top_n=0, "
    "Tensor? cu_num_draft_tokens=None, SymInt? vocab_size=None) "
    "-> (Tensor out_token_ids, Tensor logprobs, Tensor ranks, Tensor status, Tensor[] cu_num_tokens)",
    fake=_fake,
    reference=_reference_token_logprobs,
)
