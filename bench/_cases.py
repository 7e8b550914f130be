"""Shapes from real models, and inputs whose acceptance is what drafters reach."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

#: The drafts of a request are accepted one by one with about this probability.
ACCEPTANCE = 0.7
TEMPERATURE = 0.8
#: Logits of language models spread about this much around their mean.
LOGIT_STD = 3.0
#: For draft = target + noise, sum(min(p, q)) is 2 * Phi(-noise / (2 * temperature)): 0.7 at 0.77.
DRAFT_NOISE = 0.77 * TEMPERATURE


class Draft(Enum):
    """Which draft law comes with the drafts."""

    DENSE = "dense"
    DENSE_LOGSUMEXP = "dense+lse"
    ONE_HOT = "one-hot"
    GREEDY = "greedy"

    @property
    def has_logits(self) -> bool:
        return self in (Draft.DENSE, Draft.DENSE_LOGSUMEXP)


@dataclass(frozen=True)
class Goals:
    """What a case must reach: speed-ups over rivals, slowdowns over others, microseconds a call."""

    vllm: float | None = None
    vllm_argmax: float | None = None
    read_loop: float | None = 1.3
    plain: float | None = None
    microseconds: float | None = None


@dataclass(frozen=True)
class Case:
    batch: int
    num_drafts: int
    draft: Draft
    dtype: torch.dtype = torch.float32
    vocab_size: int = 151_936
    goals: Goals = Goals(read_loop=None)

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.").replace("float", "f")
        return f"V{self.vocab_size}-B{self.batch}-k{self.num_drafts}-{dtype}-{self.draft.value}"

    @property
    def greedy(self) -> bool:
        return self.draft is Draft.GREEDY


VERIFY_CHAIN = (
    Case(1, 3, Draft.DENSE, goals=Goals(vllm=40)),
    Case(16, 3, Draft.DENSE, goals=Goals(vllm=20)),
    Case(16, 3, Draft.DENSE_LOGSUMEXP, torch.bfloat16, goals=Goals(vllm=45)),
    Case(1, 3, Draft.ONE_HOT, goals=Goals(vllm=50)),
    Case(16, 3, Draft.ONE_HOT, goals=Goals(vllm=30)),
    Case(16, 3, Draft.GREEDY, goals=Goals(vllm=4, vllm_argmax=1.2)),
    Case(1, 3, Draft.DENSE_LOGSUMEXP),
    Case(1, 3, Draft.GREEDY),
    Case(64, 7, Draft.DENSE, vocab_size=32_000),
    Case(8, 4, Draft.DENSE, vocab_size=128_256),
)
FILTERS = (
    Case(16, 3, Draft.DENSE, goals=Goals(vllm=25, read_loop=None, plain=2)),
    Case(16, 3, Draft.DENSE, torch.bfloat16, goals=Goals(vllm=25, read_loop=None, plain=2)),
    Case(1, 3, Draft.DENSE, torch.bfloat16),
)
PLUGIN = (
    Case(1, 3, Draft.DENSE, goals=Goals(vllm=30, read_loop=None)),
    Case(16, 3, Draft.DENSE, goals=Goals(vllm=18, read_loop=None)),
    Case(1, 3, Draft.ONE_HOT),
    Case(16, 3, Draft.ONE_HOT),
    Case(1, 3, Draft.GREEDY),
    Case(16, 3, Draft.GREEDY),
)
PLUGIN_FILTERS = (
    Case(16, 3, Draft.DENSE, goals=Goals(vllm=25, read_loop=None)),
    Case(16, 3, Draft.DENSE, torch.bfloat16, goals=Goals(vllm=25, read_loop=None)),
    Case(1, 3, Draft.ONE_HOT),
)
#: Ops that touch no logits; an engine calls them one by one between its steps.
PREPARATION = Case(16, 3, Draft.ONE_HOT, vocab_size=64, goals=Goals(read_loop=None, microseconds=6))
ROWS = (
    Case(1, 0, Draft.ONE_HOT),
    Case(16, 0, Draft.ONE_HOT),
    Case(16, 0, Draft.ONE_HOT, torch.bfloat16),
    Case(16, 0, Draft.GREEDY),
    Case(64, 0, Draft.ONE_HOT, vocab_size=32_000),
)
#: Of these `sample` draws from a few ids and hands over their law.
LIKELIEST = (
    Case(1, 0, Draft.ONE_HOT),
    Case(16, 0, Draft.ONE_HOT),
    Case(16, 0, Draft.ONE_HOT, torch.bfloat16),
)
RECOVERED = (
    Case(1, 3, Draft.DENSE),
    Case(16, 3, Draft.DENSE),
    Case(16, 3, Draft.ONE_HOT),
)
COUNTS = (
    Case(1, 3, Draft.ONE_HOT, vocab_size=64),
    Case(256, 7, Draft.ONE_HOT, vocab_size=64),
)


@dataclass(frozen=True)
class Inputs:
    """One step of an engine: what ``verify_chain`` takes, for requests with k drafts each."""

    case: Case
    target_logits: Tensor
    draft_token_ids: Tensor
    draft_logits: Tensor | None
    draft_logsumexp: Tensor | None
    temperature: Tensor
    seeds: Tensor
    positions: Tensor

    @functools.cached_property
    def cu_num_draft_tokens(self) -> Tensor:
        counts = torch.arange(self.case.batch + 1, dtype=torch.int32)
        return counts * self.case.num_drafts

    @functools.cached_property
    def target_rows(self) -> Tensor:
        """Indices of the drafts' rows in ``target_logits``."""
        rows = torch.arange(self.case.batch * (self.case.num_drafts + 1)).view(self.case.batch, -1)
        return rows[:, :-1].flatten()

    @functools.cached_property
    def bonus_rows(self) -> Tensor:
        """Indices of the bonus rows in ``target_logits``."""
        return torch.arange(1, self.case.batch + 1) * (self.case.num_drafts + 1) - 1

    def num_bytes(self) -> int:
        tensors = [self.target_logits] + ([] if self.draft_logits is None else [self.draft_logits])
        return sum(t.numel() * t.element_size() for t in tensors)


def make_inputs(case: Case, index: int) -> Inputs:
    """Inputs number ``index`` of a case; the same numbers in every run."""
    generator = torch.Generator().manual_seed(0x5EED + index)
    batch, k, vocab_size = case.batch, case.num_drafts, case.vocab_size
    target = torch.empty(batch, k + 1, vocab_size).normal_(0, LOGIT_STD, generator=generator)
    draft_rows = target[:, :k].reshape(batch * k, vocab_size)
    draft_logits = draft_logsumexp = None
    temperature = 0.0 if case.greedy else TEMPERATURE

    if case.draft.has_logits:
        noise = torch.empty_like(draft_rows).normal_(0, DRAFT_NOISE, generator=generator)
        draft_logits = noise.add_(draft_rows).to(case.dtype)
        drafts = _draw(draft_logits, generator)
        if case.draft is Draft.DENSE_LOGSUMEXP:
            draft_logsumexp = torch.stack([(row.double() / TEMPERATURE).logsumexp(0) for row in draft_logits])
    elif case.greedy:
        drafts = draft_rows.argmax(dim=1) if k else torch.empty(0, dtype=torch.int64)
        miss = torch.rand(batch * k, generator=generator) >= ACCEPTANCE
        drafts = torch.where(miss, (drafts + 1) % vocab_size, drafts)
    else:
        drafts = torch.randint(vocab_size, (batch * k,), generator=generator)
        for i, token in enumerate(drafts.tolist()):
            row = target[i // k, i % k]
            row[token] = -math.inf
            others = (row / TEMPERATURE).logsumexp(0)
            row[token] = TEMPERATURE * (others + math.log(ACCEPTANCE / (1 - ACCEPTANCE)))

    return Inputs(
        case=case,
        target_logits=target.view(batch * (k + 1), vocab_size).to(case.dtype),
        draft_token_ids=drafts.to(torch.int32),
        draft_logits=draft_logits,
        draft_logsumexp=draft_logsumexp,
        temperature=torch.full((batch,), temperature),
        seeds=torch.randint(2**62, (batch,), generator=generator),
        positions=torch.randint(100, 4000, (batch,), generator=generator),
    )


def _draw(logits: Tensor, generator: torch.Generator) -> Tensor:
    """One token of each row by the law of the logits."""
    tokens = []
    for row in logits:
        prefix = (row.double() / TEMPERATURE).softmax(0).cumsum(0)
        u = torch.rand(1, dtype=torch.float64, generator=generator)
        tokens.append(torch.searchsorted(prefix, u, right=True).clamp(max=row.numel() - 1))
    return torch.cat(tokens)
