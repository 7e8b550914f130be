"""Lossy rules of verify_chain: exact laws over small vocabularies, and how far they are from the target's."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from typing import Any

import implementations
import inputs
import margins
import pytest
import random_chains
import torch
from implementations import REFERENCE, Implementation
from specdec_ops.ops import verify_chain
from specdec_ops.rules import Lenience, LossyRule, Margin, Thresholds, TopN, Typical
from test_block import laws_of
from test_laws import CASE_A, Law, law, random_model, residual

EXTRAS = random_chains.EXTRAS
STEP = 1e-5
ONE, ZERO = Fraction(1), Fraction(0)
RULES: list[LossyRule] = [
    Lenience(0.75),
    Lenience(0.5),
    Typical(),
    Typical(0.4, 0.9),
    TopN(2, 0.21),
    TopN(1, 1.0),
    TopN(3, 1.0),
    Thresholds(0.41, 0.8),
    Thresholds(1.0, 0.5),
    Thresholds(),
    Margin(0.5),
    Margin(0.95),
]
LAWS = [
    CASE_A,
    (law(10, 6, 3, 1), law(1, 1, 1, 1)),
    (law(3, 3, 2, 0), law(1, 2, 3, 4)),
    (law(90, 5, 3, 2), law(2, 5, 5, 8)),
    *((random_model(s, 4, zeros=True)(()), random_model(s + 50, 4)(())) for s in range(60, 64)),
]
#: Added to the logits, so that some are positive.
SHIFT = 3.0


def acceptance(rule: LossyRule, p: Law, told: Law, x: int) -> Fraction:
    """By the definition: how probable it is that draft x is accepted."""
    exact = min(ONE, p[x] / told[x])
    if p[x] == 0:
        return ZERO
    if isinstance(rule, Lenience):
        return min(ONE, p[x] / (told[x] * Fraction(rule.factor)))
    if isinstance(rule, Typical):
        entropy = -sum(float(v) * math.log(v) for v in p if v > 0)
        return ONE if p[x] > min(rule.epsilon, rule.delta * math.exp(-entropy)) else ZERO
    if isinstance(rule, TopN):
        larger = sum(v > p[x] for v in p)
        return ONE if larger < rule.n and max(p) - p[x] <= rule.delta else ZERO
    if isinstance(rule, Thresholds):
        return ONE if p[x] >= rule.single else min(ONE, p[x] / Fraction(rule.acc))
    logits = sorted((math.log(v) + SHIFT for v in p if v > 0), reverse=True)
    close = len(logits) > 1 and logits[1] > max(0.0, rule.theta * logits[0])
    return ONE if close and p[x] >= sorted(p)[-2] else exact


def recovered(rule: LossyRule, p: Law, told: Law, x: int) -> Law:
    """The law of the token after a rejection of x."""
    one_hot = tuple(Fraction(v == x) for v in range(len(p)))
    if isinstance(rule, Typical | TopN):
        best = p.index(max(p))
        return tuple(Fraction(v == best) for v in range(len(p)))
    if isinstance(rule, Thresholds):
        return residual(p, one_hot)
    if isinstance(rule, Lenience):
        return (
            residual(tuple(v / Fraction(rule.factor) for v in p), told)
            if told != one_hot
            else residual(p, told)
        )
    return residual(p, told)


def emitted_law(rule: LossyRule, p: Law, q: Law, *, one_hot: bool) -> tuple[Law, Fraction]:
    """The law of what one slot emits, and the rate of acceptance."""
    out, rate = [ZERO] * len(p), ZERO
    for x in range(len(p)):
        told = tuple(Fraction(v == x) for v in range(len(p))) if one_hot else q
        a = acceptance(rule, p, told, x)
        rate += q[x] * a
        out[x] += q[x] * a
        for y, share in enumerate(recovered(rule, p, told, x)):
            out[y] += q[x] * (1 - a) * share
    return tuple(out), rate


@pytest.mark.parametrize("draft_law", inputs.DRAFT_LAWS)
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_every_draft_and_every_coin(implementation: Implementation, rule: LossyRule, draft_law: str) -> None:
    """Each coin just below and above its threshold, each edge of the last token's law from both sides."""
    for p, q in LAWS:
        size = len(p)
        drafts: list[int] = []
        coins: list[float] = []
        last: list[float] = []
        expected: list[tuple[bool, int, bool]] = []
        for x in range(size):
            told = tuple(Fraction(v == x) for v in range(size)) if draft_law == "one_hot" else q
            threshold = acceptance(rule, p, told, x)
            edges = list(itertools.accumulate(recovered(rule, p, told, x)))[:-1]
            for accepted, v, below in itertools.product((True, False), range(size - 1), (True, False)):
                if threshold == (0 if accepted else 1) or edges[v] == (0 if below else 1):
                    continue
                drafts.append(x)
                coins.append(float(threshold) + (-STEP if accepted else STEP))
                last.append(float(edges[v]) + (-STEP if below else STEP))
                expected.append((accepted, v, below))
        n = len(drafts)
        rows = inputs.logits_of([[float(v) for v in p]]) + SHIFT
        out = implementation.verify_chain(
            rows.expand(2 * n, -1),
            torch.tensor(drafts),
            torch.arange(n + 1),
            accept_uniforms=torch.tensor(coins, dtype=torch.float64).clamp(0, 1 - 2.0**-53),
            recovered_uniforms=torch.tensor(last, dtype=torch.float64),
            rule=rule,
            **laws_of(draft_law, [q] * n),
        )
        for x, tokens, count, (accepted, v, below) in zip(
            drafts, out.token_ids.tolist(), out.num_accepted.tolist(), expected, strict=True
        ):
            assert count == accepted, (p, q, x)
            assert tokens[0] == x if accepted else (tokens[0] <= v) == below, (p, q, x)


@pytest.mark.parametrize("one_hot", [False, True])
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_distance_from_the_target_is_at_least_what_is_accepted_too_much(
    rule: LossyRule, one_hot: bool
) -> None:
    for p, q in LAWS:
        out, rate = emitted_law(rule, p, q, one_hot=one_hot)
        assert sum(out) == 1
        distance = sum((abs(a - b) for a, b in zip(out, p, strict=True)), ZERO) / 2
        assert distance >= rate - sum((min(a, b) for a, b in zip(p, q, strict=True)), ZERO)
        if isinstance(rule, Lenience):
            assert all(o <= v / Fraction(rule.factor) for o, v in zip(out, p, strict=True))
    if isinstance(rule, Thresholds) and rule == (1.0, 1.0):
        assert all(emitted_law(rule, p, q, one_hot=one_hot)[0] == p for p, q in LAWS)


def test_goldens_of_lenience() -> None:
    p, q = CASE_A
    out, rate = emitted_law(Lenience(0.75), p, q, one_hot=False)
    assert (out, rate) == ((Fraction(16, 45), Fraction(1, 3), Fraction(14, 45)), Fraction(5, 6))
    assert sum(abs(a - b) for a, b in zip(out, p, strict=True)) / 2 == Fraction(13, 90)
    assert emitted_law(Lenience(0.5), p, q, one_hot=False) == (q, ONE)


@pytest.mark.parametrize("draft_law", inputs.DRAFT_LAWS)
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_ragged_batches_match_the_reference(
    default_native: Implementation, rule: LossyRule, draft_law: str
) -> None:
    changed = 0
    for seed in range(6):
        arguments = inputs.chain(
            [3, 0, 1, 6, 2, 4],
            60,
            draft_law,
            seed=seed,
            uniforms=seed % 2 == 1,
            dtype=random_chains.DTYPES[seed % 3],
            noise=1.5,
        )
        arguments["target_logits"] = arguments["target_logits"] + SHIFT
        arguments["temperature"][4:] = 0.0
        arguments["draft_token_ids"][11] = -1
        arguments["rule_mask"] = torch.rand(16, generator=inputs.generator(seed)) < 0.7
        out = default_native.verify_chain(**arguments, rule=rule, **EXTRAS)
        expected = REFERENCE.verify_chain(**arguments, rule=rule, **EXTRAS)
        for name in ("token_ids", "num_accepted", "status"):
            assert torch.equal(getattr(out, name), getattr(expected, name)), name
        for name in ("logsumexp", "logprobs", "accept_probs"):
            torch.testing.assert_close(
                getattr(out, name), getattr(expected, name), equal_nan=True, rtol=1e-4, atol=1e-5
            )
        plain = default_native.verify_chain(**arguments, rule=rule)
        assert margins.all_same_bits(plain[:3], out[:3])
        arguments.pop("rule_mask")
        changed += not torch.equal(out.token_ids, default_native.verify_chain(**arguments).token_ids)
    assert changed or (isinstance(rule, Thresholds) and rule == (1.0, 1.0))


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_a_mask_of_false_is_token_level(implementation: Implementation, rule: LossyRule) -> None:
    arguments = inputs.chain([3, 2, 4], 30, "logits", seed=2)
    masked = implementation.verify_chain(
        **arguments, rule=rule, rule_mask=torch.zeros(9, dtype=torch.bool), **EXTRAS
    )
    assert margins.all_same_bits(masked, implementation.verify_chain(**arguments, **EXTRAS))


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_every_tier_has_the_same_bits(rule: LossyRule) -> None:
    arguments = inputs.chain([4, 2, 0, 5], 9001, "logits", seed=3, dtype=torch.bfloat16, scale=1.0)
    results = []
    for name in implementations.native_cpu_names():
        with implementations.use(name) as tier:
            results.append(tier.verify_chain(**arguments, rule=rule, **EXTRAS))
    assert all(margins.all_same_bits(results[0], other) for other in results[1:])


@pytest.mark.parametrize("vocab_size", [5, 4097, 9001])
def test_bar_of_typical_acceptance_lies_where_the_entropy_says(
    native: Implementation, vocab_size: int
) -> None:
    """Of the whole row, in any block: a delta just below and above the draft's."""
    row = 2 * torch.randn(1, vocab_size, generator=inputs.generator(vocab_size))
    p = row.double().softmax(1)[0]
    entropy = float(-(p * p.log()).sum())
    x = int(p.argsort()[vocab_size // 2])
    bar = float(p[x]) / math.exp(-entropy)
    assert 0 < bar < 1
    for delta, accepted in ((bar * (1 - 5e-6), 1), (bar * (1 + 5e-6), 0)):
        out = native.verify_chain(
            row.expand(2, -1),
            torch.tensor([x]),
            torch.tensor([0, 1]),
            seeds=1,
            positions=torch.tensor([0]),
            rule=Typical(1.0, delta),
        )
        assert out.num_accepted.tolist() == [accepted]
        if not accepted:
            assert out.token_ids[0, 0] == row.argmax()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_masked_drafts_are_never_accepted(implementation: Implementation, temperature: float) -> None:
    rows = torch.tensor([[1.0, 2.0, -math.inf, 1.9]] * 2)
    for rule in (*RULES, TopN(4, 1.0), Thresholds(0.0, 0.5), Typical(0.0, 0.0), Margin(0.0)):
        out = implementation.verify_chain(
            rows,
            torch.tensor([2]),
            torch.tensor([0, 1]),
            temperature=temperature,
            accept_uniforms=torch.zeros(1),
            recovered_uniforms=torch.zeros(1),
            rule=rule,
        )
        assert out.num_accepted.tolist() == [0] and out.token_ids[0, 0] != 2


def test_errors() -> None:
    arguments: dict[str, Any] = inputs.chain([2], 8, "one_hot")
    native = implementations.loaded_native()
    for rule, message in (
        (Lenience(0.0), r"rule must have its factor in \["),
        (Typical(-0.1), r"rule must have its epsilon in \[0, 1\], got -0.1"),
        (Typical(0.1, math.nan), r"rule must have its delta in \[0, 1\], got nan"),
        (TopN(0), r"rule must have its n in \[1, "),
        (Thresholds(2.0), r"rule must have its single in \[0, 1\], got 2"),
        (Margin(1.5), r"rule must have its theta in \[0, 1\], got 1.5"),
    ):
        with pytest.raises(RuntimeError, match=f"verify_chain: {message}"):
            native.verify_chain(**arguments, rule=rule)
    with pytest.raises(RuntimeError, match="verify_chain: rule must be a name or one of"):
        native.verify_chain(**arguments, rule=(0.5,))
    with pytest.raises(RuntimeError, match="rule_parameters must have 2 elements for rule 'typical', got 0"):
        native.verify_chain(**arguments, rule="typical")
    with pytest.raises(RuntimeError, match="rule_mask must be given with a lossy rule alone, got it with 'b"):
        native.verify_chain(**arguments, rule="block", rule_mask=torch.ones(2, dtype=torch.bool))
    with pytest.raises(RuntimeError, match="verify_chain: rule_mask must be bool, got int64"):
        native.verify_chain(**arguments, rule=TopN(), rule_mask=torch.ones(2, dtype=torch.int64))
    with pytest.raises(RuntimeError, match=r"verify_chain: rule_mask must be \[num_drafts\]"):
        native.verify_chain(**arguments, rule=TopN(), rule_mask=torch.ones(3, dtype=torch.bool))


def test_opcheck() -> None:
    arguments = inputs.chain([2, 0, 3], 70, "logits")
    names = ("target_logits", "draft_token_ids", "cu_num_draft_tokens", "temperature")
    args = (*(arguments.pop(name) for name in names), 3)
    options = {"rule": "top_n", "rule_parameters": [3.0, 0.5], "rule_mask": torch.ones(5, dtype=torch.bool)}
    torch.library.opcheck(verify_chain._op, args, {**arguments, **options})
