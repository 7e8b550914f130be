"""Comparison with the float64 reference, which rounds nowhere on purpose.

An implementation may differ from it only where a draw falls within rounding of its threshold. The
functions here bound that rounding from the reference's own numbers, and excuse nothing else.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from implementations import REFERENCE
from specdec_ops import Status, _reference
from torch import Tensor

Float64Array = npt.NDArray[np.float64]
#: Below this a float32 weight may be flushed to zero.
TINY = 1e-36


def relative_error(gap: Any) -> Any:
    """Of a probability ``gap = |x - max| / temperature`` below its row's largest."""
    return 6e-8 * gap + 2e-7


class Law(NamedTuple):
    probs: Float64Array
    #: How far a float32 implementation may be from each probability.
    error: Float64Array


def law_of_logits(logits: Tensor, temperature: float, size: int, probs: Float64Array) -> Law:
    if not temperature >= _reference.GREEDY_TEMPERATURE:
        return Law(probs, np.zeros(size))
    x = logits[:size].to(torch.float64).numpy()
    with np.errstate(invalid="ignore"):
        error = probs * relative_error((x.max() - x) / temperature)
    return Law(probs, np.nan_to_num(error))


class TargetRows:
    """The rows of logits of one call, each read once."""

    def __init__(self, logits: Tensor, size: int) -> None:
        self.logits, self.size = logits, size
        self._read: dict[tuple[int, float], tuple[_reference.Row, Law]] = {}

    def __call__(self, index: int, temperature: float) -> tuple[_reference.Row, Law]:
        key = (index, temperature)
        if key not in self._read:
            row = _reference.read_row(self.logits[index], temperature, self.size)
            self._read[key] = row, law_of_logits(self.logits[index], temperature, self.size, row.probs)
        return self._read[key]

    def logsumexp_error(self, index: int, temperature: float) -> float:
        row, law = self(index, temperature)
        if row.status != Status.OK:
            return 0.0
        return float(law.error.sum()) + float(relative_error(abs(row.logsumexp)) - relative_error(0))


def pick_is_near(law: Law, draw: _reference.TokenDraw) -> bool:
    """Whether rounding can make a draw choose another id."""
    for ids, size, number in _reference.levels(law.probs, draw):
        parts = Law(*(_reference.sums_of_parts(values, ids, size) for values in law))
        if choice_is_near(parts, number):
            return True
    return False


def choice_is_near(law: Law, u: float) -> bool:
    """Whether rounding can move the inverse CDF at ``u`` to another index."""
    weights, error = law
    edges = np.flatnonzero((weights > 0) | (error > 0))
    if weights[edges[-1]] > error[edges[-1]]:
        edges = edges[:-1]
    prefix = np.cumsum(weights)
    slack = np.cumsum(error) + u * error.sum() + 2e-16 * prefix[-1] + TINY
    return bool((np.abs(prefix - u * prefix[-1]) <= slack)[edges].any())


def _value(arguments: dict[str, Any], name: str, index: int, default: Any = None) -> Any:
    value = arguments.get(name)
    if value is None:
        return default
    return value[index].item() if isinstance(value, Tensor) else value


def draft_law(arguments: dict[str, Any], request: int, temperature: float, size: int) -> _reference.DraftLaw:
    return _reference.DraftLaw(
        has_law=bool(_value(arguments, "has_draft_law", request, True)),
        logits=arguments.get("draft_logits"),
        probs=arguments.get("draft_probs"),
        logsumexp=arguments.get("draft_logsumexp"),
        support_ids=arguments.get("draft_support_ids"),
        support_logprobs=arguments.get("draft_support_logprobs"),
        temperature=_value(arguments, "draft_temperature", request, temperature),
        vocab_size=size,
    )


def draft_error(law: _reference.DraftLaw, draft: int, probs: Any) -> Float64Array:
    """How far a float32 implementation may be from each probability of a draft law."""
    if law.probs is not None:
        return np.zeros(law.vocab_size)
    if law.logits is not None:
        x = law.logits[draft, : law.vocab_size].to(torch.float64).numpy()
        # With a given logsumexp the rounding of 1 / temperature counts from 0, not from the largest logit.
        origin = x.max() if law.logsumexp is None else 0.0
        gap = np.abs(origin - x) / law.temperature
    else:
        with np.errstate(divide="ignore"):
            gap = np.abs(np.log(probs))
    with np.errstate(invalid="ignore"):
        return np.nan_to_num(probs * relative_error(gap))


def recovered_is_near(p: Law, law: _reference.DraftLaw, draft: int, x: int, draws: _reference.Draws) -> bool:
    """Whether rounding can change the token that is drawn after draft ``x`` was rejected."""
    if law.is_one_hot or math.isnan(law.prob_of(draft, x)):
        without = Law(p.probs.copy(), p.error.copy())
        without.probs[x] = without.error[x] = 0.0
        return pick_is_near(without if without.probs.sum() > 0 else p, draws(0))
    probs = law.probs_of(draft)
    q = None if probs is None else Law(probs, draft_error(law, draft, probs))
    last = 0
    if draws.given is None and law.support_ids is None:
        for attempt in range(_reference.THINNING_ATTEMPTS):
            if pick_is_near(p, draws(2 * attempt)):
                return True
            y = _reference.pick(p.probs, draws(2 * attempt))
            q_of_y = law.prob_at(draft, y)
            if not math.isfinite(q_of_y):
                return False
            u, p_of_y = draws.uniform(2 * attempt + 1), p.probs[y]
            slack = (1 - u) * p.error[y] + (q.error[y] if q is not None else relative_error(100) * q_of_y)
            if abs(u * p_of_y - (p_of_y - q_of_y)) <= slack + TINY:
                return True
            if u * p_of_y < p_of_y - q_of_y:
                return False
        last = 2 * _reference.THINNING_ATTEMPTS
    if q is None or (p.probs == q.probs).all():
        return pick_is_near(p, draws(last))
    difference, error = p.probs - q.probs, p.error + q.error
    left = Law(np.maximum(difference, 0.0), np.where(difference > -error, error, 0.0))
    if not (difference > -error)[error > 0].any():
        return pick_is_near(p, draws(last))
    return bool(left.probs.sum() <= 2 * left.error.sum()) or pick_is_near(left, draws(last))


def draws_of(arguments: dict[str, Any], uniforms: str, request: int, slot: int = 0) -> _reference.Draws:
    if arguments.get(uniforms) is not None:
        return _reference.Draws(float(arguments[uniforms][request]))
    seed, position = _value(arguments, "seeds", request, 0), _value(arguments, "positions", request, 0)
    return _reference.Draws(None, seed, position + slot)


def coin(arguments: dict[str, Any], request: int, slot: int, draft: int) -> float:
    if arguments.get("accept_uniforms") is not None:
        return float(arguments["accept_uniforms"][draft])
    seed, position = _value(arguments, "seeds", request, 0), _value(arguments, "positions", request, 0)
    return _reference.uniform(seed, _reference.Stream.ACCEPT, slot, position)


def row_of(arguments: dict[str, Any], request: int, draft: int) -> int:
    """The row of ``target_logits`` at a draft, or at the bonus token that follows the last one."""
    return draft + (request if arguments.get("bonus_token_ids") is None else 0)


def near_requests(arguments: dict[str, Any], num_accepted: list[int], rows: TargetRows) -> list[bool]:
    """For each request, whether rounding can change a decision that led to the reference's result."""
    cu = arguments["cu_num_draft_tokens"].tolist()
    window = arguments.get("fly_window_size")
    near = []
    for r, accepted in enumerate(num_accepted):
        num_drafts = cu[r + 1] - cu[r]
        temperature = float(_value(arguments, "temperature", r, 1.0))
        law = draft_law(arguments, r, temperature, rows.size)
        slots = range(accepted + 1)
        if accepted == num_drafts and arguments.get("bonus_token_ids") is not None:
            slots = range(accepted)
        is_near = False
        if temperature >= _reference.GREEDY_TEMPERATURE:
            # A look-ahead reads rows behind the one that decides.
            ahead = range(accepted + 1, min(accepted + 1 + (window or 0), num_drafts))
            is_near = any(
                _slot_is_near(arguments, rows, r, i, num_drafts, temperature, law, is_last=i == accepted)
                for i in (*slots, *ahead)
            )
        if window is not None:
            is_near = is_near or any(
                _entropy_is_near(arguments, rows, row_of(arguments, r, cu[r] + i), temperature)
                for i in range(min(accepted + 1, num_drafts - window))
            )
        near.append(is_near)
    return near


def _entropy_is_near(arguments: dict[str, Any], rows: TargetRows, index: int, temperature: float) -> bool:
    """Whether rounding can move the entropy of a row across FLy's threshold."""
    threshold = arguments.get("fly_entropy_threshold", 0.3)
    if threshold <= 0:
        return False
    _, (probs, error) = rows(index, temperature if temperature >= _reference.GREEDY_TEMPERATURE else 1.0)
    k = arguments.get("fly_entropy_top_k", 3)
    entropy = _reference.entropy_of_largest(probs, k)
    largest = np.argsort(probs)[-k:]
    largest = largest[probs[largest] > 0]
    slack = (np.abs(1 + np.log(probs[largest])) * error[largest]).sum() + 1e-14
    return bool(abs(entropy - threshold) <= slack)


def _slot_is_near(
    arguments: dict[str, Any],
    rows: TargetRows,
    r: int,
    i: int,
    num_drafts: int,
    temperature: float,
    law: _reference.DraftLaw,
    *,
    is_last: bool,
) -> bool:
    draft = int(arguments["cu_num_draft_tokens"][r]) + i
    row, p = rows(row_of(arguments, r, draft), temperature)
    if row.status != Status.OK:
        return False
    x = int(arguments["draft_token_ids"][draft]) if i < num_drafts else -1
    is_draft = 0 <= x < law.vocab_size
    # A synthetic rate is compared with the coin as it is.
    if is_draft and arguments.get("accept_rates") is None:
        left, slack = coin(arguments, r, i, draft), 0.0
        if not (law.is_one_hot or math.isnan(law.prob_of(draft, x))):
            probs = law.probs_of(draft)
            if probs is not None:
                slack = left * draft_error(law, draft, probs)[x]
            left *= law.prob_of(draft, x)
        if p.probs[x] > 0 and abs(left - p.probs[x]) <= slack + p.error[x] + TINY:
            return True
    if not is_last:
        return False
    draws = draws_of(arguments, "recovered_uniforms", r, slot=i)
    return recovered_is_near(p, law, draft, x, draws) if is_draft else pick_is_near(p, draws(0))


def same_bits(left: Tensor | None, right: Tensor | None) -> bool:
    """Whether two outputs agree in every bit, NaNs included."""
    if left is None or right is None:
        return left is right
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    if left.is_floating_point():
        integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[left.element_size()]
        left, right = left.contiguous().view(integer), right.contiguous().view(integer)
    return torch.equal(left, right)


def all_same_bits(left: Any, right: Any) -> bool:
    return all(same_bits(a, b) for a, b in zip(left, right, strict=True))


def assert_chain_matches(actual: Any, arguments: dict[str, Any], *, max_near: int = 0) -> int:
    """Compares a ``verify_chain`` result with the reference; returns how many draws were near.

    At most ``max_near`` requests may hang on a draw within rounding of its threshold.
    """
    options = {
        name: getattr(actual, name.removeprefix("return_")) is not None
        for name in ("return_logsumexp", "return_logprobs", "return_accept_probs")
    }
    expected = REFERENCE.verify_chain(**{**arguments, **options})
    target = arguments["target_logits"]
    rows = TargetRows(target, arguments.get("vocab_size") or target.shape[1])
    near = near_requests(arguments, expected.num_accepted.tolist(), rows)
    assert sum(near) <= max_near, f"{sum(near)} draws within rounding of a threshold: choose other seeds"
    sure = ~torch.tensor(near, dtype=torch.bool)
    for name in ("token_ids", "num_accepted", "status"):
        got, want = getattr(actual, name), getattr(expected, name)
        assert got.dtype == want.dtype and got.shape == want.shape, name
        assert torch.equal(got[sure], want[sure]), (name, got[sure], want[sure])
    _assert_floats_match(actual, expected, arguments, near, rows)
    return sum(near)


def _assert_floats_match(
    actual: Any, expected: Any, arguments: dict[str, Any], near: list[bool], rows: TargetRows
) -> None:
    cu = arguments["cu_num_draft_tokens"].tolist()
    for r in (r for r, is_near in enumerate(near) if not is_near):
        given = float(_value(arguments, "temperature", r, 1.0))
        temperature = given if given >= _reference.GREEDY_TEMPERATURE else 1.0
        law = draft_law(arguments, r, given, rows.size)
        num_drafts = cu[r + 1] - cu[r]
        for i in range(num_drafts + 1):
            draft = cu[r] + i
            row = row_of(arguments, r, draft)
            has_row = i < num_drafts or arguments.get("bonus_token_ids") is None
            reached = has_row and i <= int(expected.num_accepted[r])
            bound = rows.logsumexp_error(row, temperature) if reached else 0.0
            if actual.logsumexp is not None and has_row:
                assert_close(actual.logsumexp[row], expected.logsumexp[row], bound)
            if actual.logprobs is not None:
                want = expected.logprobs[r, i]
                assert_close(actual.logprobs[r, i], want, bound + 1.2e-7 * abs(float(want)))
            if actual.accept_probs is not None and i < num_drafts:
                want = expected.accept_probs[draft]
                relative = 0.0
                if reached and given >= _reference.GREEDY_TEMPERATURE and math.isfinite(float(want)):
                    x = int(arguments["draft_token_ids"][draft])
                    relative = _ratio_error(rows(row, given)[1], law, draft, x)
                assert_close(actual.accept_probs[draft], want, float(want) * relative + TINY)
        if actual.logprobs is not None:
            assert actual.logprobs[r, num_drafts + 1 :].isnan().all()


def _ratio_error(p: Law, law: _reference.DraftLaw, draft: int, x: int) -> float:
    """The relative error of ``p(x) / q(x)`` in float32."""
    relative = 6e-8 + (p.error[x] / p.probs[x] if p.probs[x] > 0 else 0.0)
    probs = None if law.is_one_hot else law.probs_of(draft)
    if probs is not None and probs[x] > 0:
        relative += draft_error(law, draft, probs)[x] / probs[x]
    return float(relative)


def assert_close(actual: Tensor, expected: Tensor, bound: float) -> None:
    got, want = float(actual), float(expected)
    same = got == want or (np.isnan(got) and np.isnan(want)) or abs(got - want) <= bound
    assert same, f"got {got!r}, expected {want!r} within {bound:.3g}"


def assert_sample_matches(actual: Any, arguments: dict[str, Any], *, max_near: int = 0) -> int:
    """Compares a ``sample`` result with the reference; returns how many draws were near."""
    options = {"token_dtype": actual.token_ids.dtype}
    expected = REFERENCE.sample(**{**arguments, **options})
    logits = arguments["logits"]
    rows = TargetRows(logits, arguments.get("vocab_size") or logits.shape[1])
    slot = arguments.get("draft_slot")
    stream = _reference.Stream.TARGET if slot is None else _reference.Stream.DRAFT
    num_near = 0
    for r in range(logits.shape[0]):
        given = float(_value(arguments, "temperature", r, 1.0))
        row, p = rows(r, given)
        seed, position = _value(arguments, "seeds", r, 0), _value(arguments, "positions", r, 0)
        draw = _reference.token_draw(seed, stream, slot or 0, position)
        if arguments.get("uniforms") is not None:
            draw = _reference.TokenDraw(_value(arguments, "uniforms", r))
        is_near = row.status == Status.OK and pick_is_near(p, draw)
        num_near += is_near
        if not is_near:
            assert int(actual.token_ids[r]) == int(expected.token_ids[r])
        assert int(actual.status[r]) == int(expected.status[r])
        temperature = given if given >= _reference.GREEDY_TEMPERATURE else 1.0
        bound = rows.logsumexp_error(r, temperature)
        assert_close(actual.logsumexp[r], expected.logsumexp[r], bound)
        if not is_near:
            want = expected.logprobs[r]
            assert_close(actual.logprobs[r], want, bound + 1.2e-7 * abs(float(want)))
    assert num_near <= max_near, f"{num_near} draws within rounding of a threshold: choose other seeds"
    for got, want in zip(actual, expected, strict=True):
        if got is None or want is None:
            assert got is want
        else:
            assert got.dtype == want.dtype and got.shape == want.shape
    return num_near


def assert_recovered_matches(actual: Any, arguments: dict[str, Any], *, max_near: int = 0) -> int:
    """Compares a ``sample_recovered`` result with the reference; returns how many draws were near."""
    expected = REFERENCE.sample_recovered(**arguments)
    target = arguments["target_logits"]
    size = arguments.get("vocab_size") or target.shape[1]
    rows = TargetRows(target, size)
    num_near = 0
    for r, x in enumerate(arguments["draft_token_ids"].tolist()):
        temperature = float(_value(arguments, "temperature", r, 1.0))
        law = draft_law(arguments, r, temperature, size)
        row, p = rows(r, temperature)
        draws = draws_of(arguments, "uniforms", r)
        if row.status != Status.OK or temperature < _reference.GREEDY_TEMPERATURE:
            is_near = False
        elif not 0 <= x < size:
            is_near = pick_is_near(p, draws(0))
        else:
            is_near = recovered_is_near(p, law, r, x, draws)
        num_near += is_near
        if not is_near:
            assert int(actual.token_ids[r]) == int(expected.token_ids[r])
        assert int(actual.status[r]) == int(expected.status[r])
    assert num_near <= max_near, f"{num_near} draws within rounding of a threshold: choose other seeds"
    for got, want in zip(actual, expected, strict=True):
        assert got.dtype == want.dtype and got.shape == want.shape
    return num_near
