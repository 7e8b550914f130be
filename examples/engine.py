"""The decoding loop: draft, run the target once over all drafts, verify, keep what was accepted.

This is how an engine uses specdec_ops. The requests of a batch move at their own pace: each has its
own length, its own number of drafts in a step, its own seed and temperature.
"""

from __future__ import annotations

import dataclasses
import time
from itertools import accumulate
from typing import NamedTuple, Protocol

import specdec_ops
import torch
from torch import Tensor

from examples.model import Decoder, Transformer


class Requests:
    """The requests of a batch: their text so far and what of it is in the KV caches.

    Args:
        prompts: One text per request, of any lengths from 2 bytes.
        num_tokens: Bytes to write for each request.
        temperature: For all requests; below 1e-5 is greedy.
        seeds: ``[batch]`` int64.
        max_drafts: The most drafts that a step may bring.
    """

    def __init__(
        self, prompts: list[bytes], *, num_tokens: int, temperature: float, seeds: Tensor, max_drafts: int
    ) -> None:
        batch = len(prompts)
        prompt_lengths = torch.tensor([len(prompt) for prompt in prompts])
        self.max_prompt_length = int(prompt_lengths.max())
        self.prompt_lengths = prompt_lengths
        self.final_lengths = prompt_lengths + num_tokens
        self.text = torch.zeros(
            batch, self.max_prompt_length + num_tokens + max_drafts + 1, dtype=torch.int64
        )
        for row, prompt in zip(self.text, prompts, strict=True):
            row[: len(prompt)] = torch.tensor(list(prompt))
        #: Tokens in the KV cache: all of the text but the newest token.
        self.cached_lengths = prompt_lengths - 1
        self.temperature = torch.full((batch,), temperature)
        self.seeds = seeds
        self._offsets = torch.arange(max_drafts + 2)

    def window(self, first: int, width: int) -> Tensor:
        """Columns of ``text``, ``[batch, width]``; 0 is the newest token."""
        return self.cached_lengths.unsqueeze(1) + self._offsets[:width] + first

    def newest(self, width: int) -> Tensor:
        """The ``width`` newest tokens of each request."""
        return self.text.gather(1, self.window(1 - width, width))

    def remaining(self) -> Tensor:
        """Tokens that each request still lacks."""
        return self.final_lengths - self.cached_lengths - 1

    def append(self, token_ids: Tensor, num_emitted: Tensor) -> None:
        """Adds the first ``num_emitted`` of each row; a later step overwrites what is beyond."""
        self.text.scatter_(1, self.window(1, token_ids.shape[1]), token_ids)
        self.cached_lengths += num_emitted

    def written(self) -> list[bytes]:
        """What each request wrote after its prompt."""
        lengths = zip(self.prompt_lengths.tolist(), self.final_lengths.tolist(), strict=True)
        return [bytes(row[start:end]) for row, (start, end) in zip(self.text.tolist(), lengths, strict=True)]


class Drafts(NamedTuple):
    """The drafts of one step, ragged: request after request, as ``verify_chain`` takes them."""

    #: ``[num_drafts]`` int64.
    token_ids: Tensor
    #: Number of drafts of each request.
    counts: list[int]
    #: ``[batch, k, 256]`` draft logits and ``[batch, k]`` logsumexp, whatever lies behind a request's own
    #: drafts; None if the drafts are not drawn from a distribution (one-hot).
    logits: Tensor | None = None
    logsumexp: Tensor | None = None


class Drafter(Protocol):
    """Proposes drafts."""

    def start(self, requests: Requests) -> None:
        """Gets ready for a new batch."""

    def propose(self, requests: Requests, max_counts: list[int]) -> Drafts:
        """Drafts for every request, at most ``max_counts`` of them."""


class NgramDrafter:
    """Prompt lookup: finds where the newest bytes occurred before and drafts what followed there.

    Args:
        max_ngram: Longest run of newest bytes that is looked up.
        min_ngram: Shortest; with no match at this length the request gets no drafts.
    """

    def __init__(self, max_ngram: int = 8, min_ngram: int = 3) -> None:
        self._max_ngram, self._min_ngram = max_ngram, min_ngram

    def start(self, requests: Requests) -> None:
        """Nothing to prepare."""

    def propose(self, requests: Requests, max_counts: list[int]) -> Drafts:
        """See ``Drafter``."""
        proposals = []
        lengths = (requests.cached_lengths + 1).tolist()
        for row, length, count in zip(requests.text.tolist(), lengths, max_counts, strict=True):
            proposals.append(self.look_up(bytes(row[:length]), count) if count else b"")
        return Drafts(torch.tensor(list(b"".join(proposals)), dtype=torch.int64), [len(p) for p in proposals])

    def look_up(self, text: bytes, count: int) -> bytes:
        """What followed the latest earlier occurrence of the newest bytes, or nothing.

        Where the text ends too early, its end is taken to go on periodically.
        """
        for n in range(self._max_ngram, self._min_ngram - 1, -1):
            match = text.rfind(text[-n:], 0, len(text) - 1)
            if match >= 0:
                following = text[match + n : match + n + count]
                return (following * count)[:count]
        return b""


class ModelDrafter:
    """A small model that drafts one token after the other, drawing from its own distribution."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder

    def start(self, requests: Requests) -> None:
        """Reads the prompts."""
        prefill(self._decoder, requests)

    def propose(self, requests: Requests, max_counts: list[int]) -> Drafts:
        """See ``Drafter``."""
        first_position = requests.cached_lengths + 1
        # If all drafts of the last step were accepted, the cache lacks the last of them: feed two tokens.
        token_ids, cached_lengths = requests.newest(2), requests.cached_lengths - 1
        samples, logits = [], []
        for slot in range(max(max_counts)):
            logits.append(self._decoder.step(token_ids, cached_lengths))
            if slot == 0:
                logits[0] = logits[0][1::2]
            samples.append(
                specdec_ops.sample(
                    logits[slot],
                    temperature=requests.temperature,
                    seeds=requests.seeds,
                    positions=first_position,
                    draft_slot=slot,
                )
            )
            token_ids, cached_lengths = samples[slot].token_ids.unsqueeze(1), first_position + slot
        if not samples:
            return Drafts(requests.text.new_empty(0), max_counts)
        is_draft = torch.arange(len(samples)) < torch.tensor(max_counts).unsqueeze(1)
        return Drafts(
            torch.stack([s.token_ids for s in samples], dim=1)[is_draft],
            max_counts,
            torch.stack(logits, dim=1),
            torch.stack([s.logsumexp for s in samples], dim=1),
        )


@dataclasses.dataclass
class Generation:
    """What ``generate`` returns."""

    #: What each request wrote after its prompt.
    texts: list[bytes]
    #: Seconds of the decoding steps, without reading the prompts.
    seconds: float
    #: Tokens emitted by, and number of, steps of unfinished requests.
    num_emitted: int
    num_steps: int
    #: By draft position: how many drafts were proposed there, and how many accepted.
    drafted: list[int]
    accepted: list[int]


def prefill(decoder: Decoder, requests: Requests) -> None:
    """Reads the prompts into a KV cache, all but each one's last token."""
    decoder.step(
        requests.text[:, : requests.max_prompt_length - 1], torch.zeros_like(requests.cached_lengths)
    )


def generate(
    target: Decoder,
    drafter: Drafter | None,
    prompts: list[bytes],
    *,
    num_tokens: int,
    temperature: float,
    seeds: Tensor,
    max_drafts: int,
    prompts_cached: bool = False,
) -> Generation:
    """Decodes a batch to ``num_tokens`` new tokens per request.

    Args:
        target: The model whose distribution the text follows.
        drafter: What proposes drafts; None decodes plainly, one token per step.
        prompts: One per row of ``target``.
        num_tokens: Tokens to write per request.
        temperature: For all requests; below 1e-5 is greedy.
        seeds: ``[batch]`` int64.
        max_drafts: The most drafts of a request in one step.
        prompts_cached: The last run had the same prompts, so they are in the KV caches already.

    Returns:
        The texts and the counts.
    """
    requests = Requests(
        prompts, num_tokens=num_tokens, temperature=temperature, seeds=seeds, max_drafts=max_drafts
    )
    if not prompts_cached:
        prefill(target, requests)
        if drafter is not None:
            drafter.start(requests)
    step_counts = []
    start = time.perf_counter()
    while True:
        remaining = requests.remaining()
        remaining_list = remaining.tolist()
        if not any(remaining_list):
            break
        if drafter is None:
            step_counts.append(_plain_step(target, requests, remaining))
        else:
            step_counts.append(
                _speculative_step(target, drafter, requests, remaining, remaining_list, max_drafts)
            )
    seconds = time.perf_counter() - start
    return _summarize(requests, step_counts, seconds, max_drafts)


class _StepCounts(NamedTuple):
    drafted: list[int]
    accepted: Tensor
    emitted: Tensor
    status: Tensor


def _plain_step(target: Decoder, requests: Requests, remaining: Tensor) -> _StepCounts:
    logits = target.step(requests.newest(1), requests.cached_lengths)
    sample = specdec_ops.sample(
        logits,
        temperature=requests.temperature,
        seeds=requests.seeds,
        positions=requests.cached_lengths + 1,
    )
    num_emitted = remaining.clamp(max=1)
    requests.append(sample.token_ids.unsqueeze(1), num_emitted)
    return _StepCounts([0] * len(num_emitted), torch.zeros_like(num_emitted), num_emitted, sample.status)


def _speculative_step(
    target: Decoder,
    drafter: Drafter,
    requests: Requests,
    remaining: Tensor,
    remaining_list: list[int],
    max_drafts: int,
) -> _StepCounts:
    # A step emits one token more than it accepts, so a request gets one draft less than it lacks.
    max_counts = [max(min(max_drafts, n - 1), 0) for n in remaining_list]
    drafts = drafter.propose(requests, max_counts)
    counts = drafts.counts
    width = max(counts) + 1

    # The target reads the newest token and the drafts of every request, padded to one width ...
    ends = torch.tensor(list(accumulate(counts, initial=0)))
    rows = torch.tensor([r * width + i for r, count in enumerate(counts) for i in range(count + 1)])
    token_ids = requests.newest(1).expand(-1, width).contiguous()
    if drafts.token_ids.shape[0]:
        draft_cells = torch.tensor(
            [r * width + i + 1 for r, count in enumerate(counts) for i in range(count)]
        )
        token_ids.view(-1)[draft_cells] = drafts.token_ids
    logits = target.step(token_ids, requests.cached_lengths)

    # ... and its logits go to verify_chain without the padding.
    verified = specdec_ops.verify_chain(
        logits if len(rows) == len(logits) else logits.index_select(0, rows),
        drafts.token_ids,
        ends,
        temperature=requests.temperature,
        draft_logits=drafts.logits,
        draft_logsumexp=drafts.logsumexp,
        seeds=requests.seeds,
        positions=requests.cached_lengths + 1,
        max_num_draft_tokens=width - 1,
    )
    count = specdec_ops.count_accepted(verified.token_ids)
    num_emitted = torch.minimum(count.num_emitted, remaining)
    requests.append(verified.token_ids, num_emitted)
    return _StepCounts(counts, count.num_accepted, num_emitted, verified.status)


def _summarize(requests: Requests, steps: list[_StepCounts], seconds: float, max_drafts: int) -> Generation:
    statuses = torch.stack([step.status for step in steps])
    if bool(statuses.any()):
        raise RuntimeError(f"unusable logits: statuses {statuses.unique().tolist()}")
    emitted = torch.stack([step.emitted for step in steps])
    drafted = torch.tensor([step.drafted for step in steps])
    accepted = torch.stack([step.accepted for step in steps])
    positions = torch.arange(max_drafts)
    return Generation(
        texts=requests.written(),
        seconds=seconds,
        num_emitted=int(emitted.sum()),
        num_steps=int((emitted > 0).sum()),
        drafted=(drafted.unsqueeze(2) > positions).sum((0, 1)).tolist(),
        accepted=(accepted.unsqueeze(2) > positions).sum((0, 1)).tolist(),
    )


def capacity_for(model: Transformer, prompt_length: int, num_tokens: int, max_drafts: int) -> int:
    """Positions that the KV cache needs for a batch.

    Raises:
        ValueError: The model's context is too short for them.
    """
    needed = prompt_length + num_tokens + max_drafts
    capacity = min(-(-needed // 64) * 64, model.config.max_length)
    if needed > capacity:
        raise ValueError(
            f"prompt of {prompt_length} bytes + {num_tokens} tokens + {max_drafts} drafts "
            f"need {needed} positions; the model has {model.config.max_length}"
        )
    return capacity
