"""Float64 building blocks of the reference implementations.

They follow the same definitions as the native kernels (docs/numerics.md), draw the same random
numbers, and round nowhere on purpose: a native kernel may differ only where a draw falls within
rounding of its threshold.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from specdec_ops._status import Status

Float64Array = npt.NDArray[np.float64]

#: Temperatures below this are greedy.
GREEDY_TEMPERATURE = float(np.float32(1e-5))
#: A draft row whose logsumexp is no smaller gives no law: probabilities from it would lose their digits.
LARGEST_LOGSUMEXP = 1e9
_MASK32 = 0xFFFFFFFF
_MASK64 = 0xFFFFFFFFFFFFFFFF


class Stream(enum.IntEnum):
    """What a random number is for. Streams never share a counter."""

    ACCEPT = 0
    GUMBEL = 1
    DRAFT = 2
    TARGET = 3
    BLOCK = 4


def splitmix64(value: int) -> int:
    """The finaliser of Steele et al.'s SplitMix64, which turns a seed into a Philox key."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)


def philox4x32(key: tuple[int, int], counter: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    """Philox4x32-10 of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3"."""
    k0, k1 = key
    c0, c1, c2, c3 = counter
    for _ in range(10):
        low, high = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (high >> 32) ^ c1 ^ k0, high & _MASK32, (low >> 32) ^ c3 ^ k1, low & _MASK32
        k0, k1 = (k0 + 0x9E3779B9) & _MASK32, (k1 + 0xBB67AE85) & _MASK32
    return c0, c1, c2, c3


def random_words(seed: int, stream: Stream, slot: int, position: int) -> Sequence[int]:
    """128 random bits that depend on these arguments alone."""
    key = splitmix64(seed & _MASK64)
    position &= _MASK64
    return philox4x32(
        (key & _MASK32, key >> 32), (slot & _MASK32, position & _MASK32, int(stream), position >> 32)
    )


def uniform(seed: int, stream: Stream, slot: int, position: int) -> float:
    """53 of the bits, in [0, 1)."""
    words = random_words(seed, stream, slot, position)
    return float(((words[0] >> 5) << 26) | (words[1] >> 6)) * 2.0**-53


#: Ids of a chunk, and of a block: the levels at which a token is chosen.
CHUNK_SIZE, BLOCK_SIZE = 64, 4096


class TokenDraw(NamedTuple):
    """The uniforms of one token: which block of its row, which chunk of that, which id.

    The caller's one uniform chooses a block, and what is left of it what is inside (``None``).
    """

    block: float
    chunk: float | None = None
    id: float | None = None


def token_draw(seed: int, stream: Stream, slot: int, position: int) -> TokenDraw:
    """Independent numbers: 53 bits for the id, and those that are left, 37 and 38."""
    words = random_words(seed, stream, slot, position)
    return TokenDraw(
        (words[3] << 6 | words[1] & 63) * 2.0**-38,
        (words[2] << 5 | words[0] & 31) * 2.0**-37,
        uniform(seed, stream, slot, position),
    )


def gumbel_noise(seed: int, position: int, size: int) -> Float64Array:
    """Gumbel noise of the ids, in powers of two."""
    key = splitmix64(seed & _MASK64)
    position &= _MASK64
    groups = -(-size // 64)
    c0 = np.arange(16 * groups, dtype=np.uint64)
    c1, c2, c3 = (np.full_like(c0, c) for c in (position & _MASK32, int(Stream.GUMBEL), position >> 32))
    k0, k1 = key & _MASK32, key >> 32
    mask, half = np.uint64(_MASK32), np.uint64(32)
    for _ in range(10):
        low, high = np.uint64(0xD2511F53) * c0, np.uint64(0xCD9E8D57) * c2
        c0, c1 = (high >> half) ^ c1 ^ np.uint64(k0), high & mask
        c2, c3 = (low >> half) ^ c3 ^ np.uint64(k1), low & mask
        k0, k1 = (k0 + 0x9E3779B9) & _MASK32, (k1 + 0xBB67AE85) & _MASK32
    # Sixteen random blocks serve sixty-four ids: the first words sixteen of them, the second words the next.
    words = np.stack([c.reshape(groups, 16) for c in (c0, c1, c2, c3)], axis=1).reshape(-1)[:size]
    u = (words.astype(np.float64) + 0.5) * 2.0**-32
    return np.asarray(-np.log2(-np.log1p(-u) / math.log(2)), dtype=np.float64)


def pick_by_noise(probs: Float64Array, seed: int, position: int) -> int:
    """The id with the largest probability times the exponential of its Gumbel noise."""
    with np.errstate(divide="ignore"):
        return int((np.log2(probs) + gumbel_noise(seed, position, probs.shape[0])).argmax())


class Row(NamedTuple):
    """A row of logits, read as a law."""

    probs: Float64Array
    logsumexp: float
    argmax: int
    status: Status


def read_row(logits: Tensor, temperature: float, vocab_size: int) -> Row:
    """The law of one row of logits; one-hot at the argmax where greedy or unusable."""
    x = logits[:vocab_size].detach().to("cpu", torch.float64).numpy()
    candidates = np.where(np.isnan(x), -np.inf, x)
    argmax = int(candidates.argmax()) if not np.isnan(x).all() else 0
    if np.isnan(x).all():
        argmax = 0
    elif np.isnan(x).any():
        argmax = int(np.flatnonzero(x == candidates.max())[0])
    one_hot = np.zeros(x.shape[0])
    one_hot[argmax] = 1.0
    if np.isnan(x).any() or np.isposinf(x).any():
        return Row(one_hot, math.nan, argmax, Status.NON_FINITE_TARGET)
    if np.isneginf(x).all():
        return Row(one_hot, -math.inf, argmax, Status.MASKED_TARGET)
    greedy = not temperature >= GREEDY_TEMPERATURE
    masked = np.isneginf(x)
    distance = np.where(masked, 0.0, x - x.max()) / (1.0 if greedy else temperature)
    weights = np.where(masked, 0.0, np.exp(distance))
    total = weights.sum()
    logsumexp = float(x.max()) / (1.0 if greedy else temperature) + math.log(total)
    return Row(one_hot if greedy else weights / total, logsumexp, argmax, Status.OK)


class Filters(NamedTuple):
    """Top-k, top-p and min-p of one request; the defaults filter nothing."""

    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    #: Whether top-p is of the probability of the whole row, not of what the others keep.
    joint: bool = False

    @classmethod
    def of(
        cls, entry: int, top_k: Tensor | None, top_p: Tensor | None, min_p: Tensor | None, joint: bool
    ) -> Filters:
        """The filters of an entry of tensors."""
        return cls(
            int(top_k[entry]) if top_k is not None else 0,
            float(top_p[entry]) if top_p is not None else 1.0,
            float(min_p[entry]) if min_p is not None else 0.0,
            joint,
        )


def filter_row_(logits: Tensor, temperature: float, vocab_size: int, filters: Filters) -> float:
    """Masks what filters leave out of a row; returns the threshold, -inf where nothing was to be done."""
    row = read_row(logits, temperature, vocab_size)
    if not temperature >= GREEDY_TEMPERATURE or row.status != Status.OK:
        return -math.inf
    x = logits[:vocab_size].detach().to("cpu", torch.float64).numpy()
    order = np.argsort(-x, kind="stable")
    threshold = -math.inf
    if filters.min_p > 0:
        kept = x - x.max() >= math.log(min(filters.min_p, 1.0)) * temperature
        threshold = float(x[kept].min())
    if 0 < filters.top_k < vocab_size:
        threshold = max(threshold, float(x[order[filters.top_k - 1]]))
    if filters.top_p < 1:
        whole = 1.0 if filters.joint else float(row.probs[x >= threshold].sum())
        reached = np.flatnonzero(np.cumsum(row.probs[order]) >= filters.top_p * whole)
        last = int(reached[0]) if reached.size else int((x > -np.inf).sum()) - 1
        threshold = max(threshold, float(x[order[last]]))
    logits[logits < threshold] = -math.inf
    return threshold


def keep_largest_(logits: Tensor, temperature: float, vocab_size: int, count: int) -> float:
    """Masks all but the largest logits of a row, the lowest ids on ties; returns the least that may stay."""
    row = read_row(logits, temperature, vocab_size)
    if not temperature >= GREEDY_TEMPERATURE or row.status != Status.OK:
        return -math.inf
    x = logits[:vocab_size].detach().to("cpu", torch.float64).numpy()
    order = np.argsort(-x, kind="stable")
    logits[torch.from_numpy(order[count:])] = -math.inf
    return float(x[order[count - 1]]) + 0.0 if count <= vocab_size else -math.inf


class SupportLaw(NamedTuple):
    """The ids of a law, the most probable first, and natural logarithms of their probabilities."""

    ids: npt.NDArray[np.int64]
    logprobs: Float64Array


def support_of(logits: Tensor, temperature: float, vocab_size: int, row: Row) -> SupportLaw:
    """The law of what is not masked of a row; one-hot where greedy or unusable."""
    if not temperature >= GREEDY_TEMPERATURE or row.status != Status.OK:
        return SupportLaw(np.array([row.argmax]), np.zeros(1))
    x = logits[:vocab_size].detach().to("cpu", torch.float64).numpy()
    order = np.argsort(-x, kind="stable")[: int((x > -np.inf).sum())]
    return SupportLaw(order, x[order] / temperature - row.logsumexp)


def support_tensors(
    laws: Sequence[SupportLaw], count: int, dtype: torch.dtype, beside: Tensor
) -> list[Tensor]:
    """``[rows, count]`` ids with -1 behind them, and float32 log-probabilities with ``-inf``."""
    ids = beside.new_full((len(laws), count), -1, dtype=dtype)
    logprobs = beside.new_full((len(laws), count), -math.inf, dtype=torch.float32)
    for row, law in enumerate(laws):
        ids[row, : law.ids.size] = torch.from_numpy(law.ids).to(ids)
        logprobs[row, : law.ids.size] = torch.from_numpy(law.logprobs).to(logprobs)
    return [ids, logprobs]


def choose(weights: Float64Array, u: float) -> int:
    """Inverse CDF: the first index whose prefix exceeds ``u * total``, else the last with weight."""
    prefix = np.cumsum(weights)
    over = np.flatnonzero(prefix > u * prefix[-1])
    return int(over[0]) if over.size else int(np.flatnonzero(weights > 0)[-1])


def levels(weights: Float64Array, draw: TokenDraw) -> Iterator[tuple[range, int, float]]:
    """The ids from which a draw chooses a part, the size of parts and the number: block, chunk, id."""
    ids = range(len(weights))
    sizes_and_numbers = [(1, draw.block)]
    if draw.chunk is not None and draw.id is not None:
        sizes_and_numbers = [(BLOCK_SIZE, draw.block), (CHUNK_SIZE, draw.chunk), (1, draw.id)]
    for size, number in sizes_and_numbers:
        yield ids, size, number
        first = ids.start + size * choose(sums_of_parts(weights, ids, size), number)
        ids = range(first, min(first + size, ids.stop))


def sums_of_parts(weights: Float64Array, ids: range, size: int) -> Float64Array:
    return np.add.reduceat(weights[ids.start : ids.stop], range(0, len(ids), size))


def pick(weights: Float64Array, draw: TokenDraw) -> int:
    """The id that a draw chooses, level by level."""
    ids, size, number = list(levels(weights, draw))[-1]
    return ids.start + size * choose(sums_of_parts(weights, ids, size), number)


def entropy_of_largest(probs: Float64Array, k: int) -> float:
    """Entropy in nats over the k largest probabilities, which are not normalised again."""
    largest = np.sort(probs)[-k:]
    largest = largest[largest > 0]
    return float(-(largest * np.log(largest)).sum())


class DraftLaw(NamedTuple):
    """The draft-law arguments of an op, for one request."""

    has_law: bool
    logits: Tensor | None
    probs: Tensor | None
    logsumexp: Tensor | None
    support_ids: Tensor | None
    support_logprobs: Tensor | None
    temperature: float
    vocab_size: int

    def prob_of(self, draft: int, x: int) -> float:
        """q(x) of a draft; NaN if the law is unusable or cannot have produced x."""
        q = self.prob_at(draft, x)
        return q if math.isfinite(q) and q > 0 else math.nan

    def prob_at(self, draft: int, token: int) -> float:
        """The law's entry for an id, negative ones as 0; not finite if the law or the entry is not."""
        probs = self._probs(draft)
        q = float(probs[token]) if probs is not None else math.nan
        return 0.0 if q < 0 and math.isfinite(q) else q

    def probs_of(self, draft: int) -> Float64Array | None:
        """The law of one draft row, None if it is not finite."""
        probs = self._probs(draft)
        return np.maximum(probs, 0.0) if probs is not None and np.isfinite(probs).all() else None

    def _probs(self, draft: int) -> Float64Array | None:
        size = self.vocab_size
        if self.logits is not None:
            row = read_row(self.logits[draft], self.temperature, size)
            logsumexp = row.logsumexp if self.logsumexp is None else float(self.logsumexp[draft])
            if not abs(logsumexp) < LARGEST_LOGSUMEXP:
                return None
            if self.logsumexp is None:
                return row.probs
            x = self.logits[draft, :size].detach().to("cpu", torch.float64).numpy()
            return np.asarray(np.exp(x / self.temperature - logsumexp), dtype=np.float64)
        if self.probs is not None:
            return self.probs[draft, :size].detach().to("cpu", torch.float64).numpy()
        assert self.support_ids is not None and self.support_logprobs is not None
        probs = np.zeros(size)
        ids = self.support_ids[draft].cpu().numpy()
        values = np.exp(self.support_logprobs[draft].to("cpu", torch.float64).numpy())
        inside = (ids >= 0) & (ids < size)
        if not np.isfinite(values[inside]).all():
            return None
        np.add.at(probs, ids[inside], values[inside])
        return probs

    @property
    def is_one_hot(self) -> bool:
        """Whether the drafts count as a one-hot law at the draft, as a greedy drafter's do."""
        if self.logits is not None:
            return not self.has_law or not self.temperature >= GREEDY_TEMPERATURE
        return not self.has_law or (self.probs is None and self.support_ids is None)


class Draws(NamedTuple):
    """Where the uniforms of a recovered, bonus or sampled token come from."""

    #: The caller's, or None.
    given: float | None
    seed: int = 0
    position: int = 0

    def __call__(self, number: int) -> TokenDraw:
        """Number ``number`` of those at the position."""
        if self.given is not None:
            return TokenDraw(self.given)
        return token_draw(self.seed, Stream.TARGET, number, self.position)

    def uniform(self, number: int) -> float:
        return uniform(self.seed, Stream.TARGET, number, self.position)


def draws_of(
    uniforms: Tensor | None, seeds: Tensor | None, positions: Tensor | None, request: int, slot: int = 0
) -> Draws:
    """The uniforms of one request at the position of a slot; 0 where a greedy request has none."""
    if uniforms is not None:
        return Draws(float(uniforms[request]))
    if seeds is None or positions is None:
        return Draws(0.0)
    return Draws(None, int(seeds[request]), int(positions[request]) + slot)


def residual(p: Float64Array, q: Float64Array) -> Float64Array:
    """``max(p - q, 0)``, or p itself where rounding leaves nothing."""
    weights = np.maximum(p - q, 0.0)
    return weights if weights.sum() > 0 else p


#: How often a recovered token is sought among draws from the target law before its own law is made.
THINNING_ATTEMPTS = 32


def recover(p: Float64Array, x: int, law: DraftLaw, draft: int, draws: Draws) -> tuple[int, Status]:
    """The token in place of draft ``x`` of target law ``p``, which was rejected."""
    without_draft = p.copy()
    without_draft[x] = 0.0
    if not without_draft.any():
        without_draft = p
    if law.is_one_hot:
        return pick(without_draft, draws(0)), Status.OK
    if math.isnan(law.prob_of(draft, x)):
        # The one-hot law is exact for every drafter.
        return pick(without_draft, draws(0)), Status.UNUSABLE_DRAFT_LAW
    last = 0
    if draws.given is None and law.support_ids is None:
        # Thinning: a token of p that is kept with probability max(p - q, 0) / p has the residual's law.
        for attempt in range(THINNING_ATTEMPTS):
            y = pick(p, draws(2 * attempt))
            q_of_y = law.prob_at(draft, y)
            if not math.isfinite(q_of_y):
                return y, Status.UNUSABLE_DRAFT_LAW
            if draws.uniform(2 * attempt + 1) * p[y] < p[y] - q_of_y:
                return y, Status.OK
        last = 2 * THINNING_ATTEMPTS
    q = law.probs_of(draft)
    if q is None:
        return pick(p, draws(last)), Status.UNUSABLE_DRAFT_LAW
    return pick(residual(p, q), draws(last)), Status.OK


def judge(
    p: Float64Array, x: int, u: float, law: DraftLaw, draft: int, *, needs_q: bool = False
) -> tuple[bool, float]:
    """Whether draft ``x`` of target law ``p`` is accepted by the coin ``u``, and ``min(1, p / q)``."""
    # No q is above 1: a coin below p accepts whatever q is.
    accepted = bool(u < p[x])
    accept_prob = float(p[x]) if law.is_one_hot else math.nan
    if not law.is_one_hot and (needs_q or not accepted):
        q = law.prob_of(draft, x)
        accepted = accepted or bool(u * q < p[x])
        accept_prob = float(np.minimum(1.0, p[x] / q))
    return accepted, accept_prob
