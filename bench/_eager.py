"""The same rules in plain torch calls: what everyone has at hand."""

from __future__ import annotations

import torch
from _cases import Inputs
from _interleave import Call
from torch import Tensor


def verify_chain(inputs: Inputs) -> Call:
    """Softmax of all rows, one coin per draft, one multinomial per request."""
    case = inputs.case
    batch, k = case.batch, case.num_drafts
    target_logits = inputs.target_logits.view(batch, k + 1, -1)
    drafts = inputs.draft_token_ids.view(batch, k).long()
    requests = torch.arange(batch)
    temperature = inputs.temperature.view(batch, 1, 1)
    draft_logits = None if inputs.draft_logits is None else inputs.draft_logits.view(batch, k, -1)

    def output(num_accepted: Tensor, last: Tensor) -> Tensor:
        slots = torch.arange(k + 1)
        tokens = torch.nn.functional.pad(drafts, (0, 1))
        tokens = torch.where(slots < num_accepted.unsqueeze(1), tokens, -1)
        tokens[requests, num_accepted] = last
        return tokens

    def greedy() -> Tensor:
        argmax = target_logits.argmax(dim=2)
        num_accepted = (argmax[:, :k] == drafts).cumprod(dim=1).sum(dim=1)
        return output(num_accepted, argmax[requests, num_accepted])

    def sampling() -> Tensor:
        p = target_logits.div(temperature).softmax(dim=2, dtype=torch.float32)
        p_draft = p[:, :k].gather(2, drafts.unsqueeze(2)).squeeze(2)
        coins = torch.rand(batch, k)
        if draft_logits is None:
            num_accepted = (coins < p_draft).cumprod(dim=1).sum(dim=1)
            weights = p[requests, num_accepted]
            slot = num_accepted.clamp(max=k - 1)
            at_draft = drafts[requests, slot]
            weights[requests, at_draft] *= (num_accepted == k).float()
        else:
            q = draft_logits.div(temperature).softmax(dim=2, dtype=torch.float32)
            q_draft = q.gather(2, drafts.unsqueeze(2)).squeeze(2)
            num_accepted = (coins * q_draft < p_draft).cumprod(dim=1).sum(dim=1)
            weights = p[requests, num_accepted]
            rejected = (num_accepted < k).nonzero().squeeze(1)
            weights[rejected] = (weights[rejected] - q[rejected, num_accepted[rejected]]).clamp_(min=0)
        return output(num_accepted, weights.multinomial(1).squeeze(1))

    return greedy if case.greedy else sampling


def sample(inputs: Inputs) -> Call:
    """Argmax, or softmax and multinomial."""
    logits = inputs.target_logits
    temperature = inputs.temperature.unsqueeze(1)
    if inputs.case.greedy:
        return lambda: logits.argmax(dim=1)
    return lambda: logits.div(temperature).softmax(dim=1, dtype=torch.float32).multinomial(1).squeeze(1)


def sample_recovered(inputs: Inputs) -> Call:
    """Softmax of both laws, their difference, multinomial."""
    case = inputs.case
    logits = inputs.target_logits[inputs.target_rows]
    draft_token_ids = inputs.draft_token_ids.long().unsqueeze(1)
    temperature = inputs.temperature.repeat_interleave(case.num_drafts).unsqueeze(1)

    def call() -> Tensor:
        weights = logits.div(temperature).softmax(dim=1, dtype=torch.float32)
        if inputs.draft_logits is None:
            weights.scatter_(1, draft_token_ids, 0.0)
        else:
            q = inputs.draft_logits.div(temperature).softmax(dim=1, dtype=torch.float32)
            weights.sub_(q).clamp_(min=0)
        return weights.multinomial(1).squeeze(1)

    return call


def row_statistics(inputs: Inputs) -> Call:
    """Log-softmax of all rows, and the sum of the smaller probabilities of each pair."""
    draft_logits = inputs.draft_logits

    def rows() -> tuple[Tensor, ...]:
        logprobs = inputs.target_logits.log_softmax(dim=1, dtype=torch.float32)
        largest = logprobs.topk(2, dim=1).values
        return largest[:, 0].exp(), largest[:, 0] - largest[:, 1], -(logprobs.exp() * logprobs).sum(dim=1)

    def pairs() -> tuple[Tensor, ...]:
        assert draft_logits is not None
        logprobs = inputs.target_logits[inputs.target_rows].log_softmax(dim=1, dtype=torch.float32)
        largest = logprobs.topk(2, dim=1).values
        p, q = logprobs.exp(), draft_logits.softmax(dim=1, dtype=torch.float32)
        return largest[:, 0], -(p * logprobs).sum(dim=1), torch.minimum(p, q).sum(dim=1)

    return rows if draft_logits is None else pairs


#: Ids that are listed beside a token.
TOP_N = 20


def token_logprobs(inputs: Inputs) -> Call:
    """Log-softmax of all rows, the largest of them, and a count."""
    tokens = inputs.target_logits.argmax(dim=1, keepdim=True)

    def call() -> tuple[Tensor, Tensor]:
        logprobs = inputs.target_logits.log_softmax(dim=1, dtype=torch.float32)
        own = logprobs.gather(1, tokens)
        return torch.cat([own, logprobs.topk(TOP_N, dim=1).values], dim=1), (logprobs >= own).sum(dim=1)

    return call
