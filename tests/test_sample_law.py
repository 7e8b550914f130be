"""sample with law_size: the law of a few ids that a token is drawn from, and that verification is given."""

from __future__ import annotations

import itertools
import math
import random
from fractions import Fraction

import chi_square
import filtering
import inputs
import margins
import numpy as np
import pytest
import specdec_ops
import test_laws
import torch
from implementations import Implementation, available_tiers, use
from specdec_ops import Status
from torch import Tensor

VOCAB_SIZES = [1, 2, 7, 16, 64, 65, 255, 257, 4096, 4097, 9000]
LOG2_E = float.fromhex("0x1.71547652b82fep+0")


def kept_ids(row: Tensor, threshold: float, count: int) -> Tensor:
    """By falling logit, then by rising id."""
    x = row.double()
    order = torch.sort(-x, stable=True).indices
    return order[(x[order] >= threshold) & (x[order] > -math.inf)][:count]


def law_of(row: Tensor, ids: Tensor, temperature: float) -> Tensor:
    """Natural logarithms in float64, at the temperature that the kernels' scale stands for."""
    powers = row[ids].double() * float(filtering.scale_of(temperature)) / LOG2_E
    return powers.log_softmax(0)


def handed_over(out: specdec_ops.SampleOutput, row: int = 0) -> tuple[list[int], list[float]]:
    """Ids and probabilities as verification takes them."""
    assert out.support_ids is not None and out.support_logprobs is not None
    count = int((out.support_ids[row] >= 0).sum())
    return out.support_ids[row, :count].tolist(), out.support_logprobs[row, :count].double().exp().tolist()


def check_law(out: specdec_ops.SampleOutput, arguments: inputs.Arguments, filters: bool) -> None:
    """Of every row: ids, probabilities to the last bit of float32, and what else is returned."""
    assert out.support_ids is not None and out.support_logprobs is not None
    law_size = arguments["law_size"]
    for r, row in enumerate(arguments["logits"]):
        entry = r if arguments.get("request_indices") is None else int(arguments["request_indices"][r])
        temperature = float(arguments["temperature"][entry]) if entry >= 0 else 0.0
        count = int((out.support_ids[r] >= 0).sum())
        ids, logprobs = out.support_ids[r, :count].long(), out.support_logprobs[r, :count]
        assert (out.support_ids[r, count:] == -1).all() and (
            out.support_logprobs[r, count:] == -math.inf
        ).all()
        if not np.float32(temperature) >= np.float32(1e-5) or out.status[r] != Status.OK:
            assert ids.tolist() == [int(out.token_ids[r])] and logprobs.tolist() == [0.0]
            assert out.thresholds[r] == -math.inf
            continue
        cut = (
            filtering.threshold_of(row, temperature, filtering.filters_at(arguments, entry))
            if filters
            else -math.inf
        )
        assert torch.equal(ids, kept_ids(row, cut, law_size))
        expected = law_of(row, ids, temperature)
        largest = row[ids[0]].double() / temperature
        assert ((logprobs.double() - expected).abs() <= 2.0**-24 * expected.abs() + 1e-14).all()
        place = ids.tolist().index(int(out.token_ids[r]))
        assert margins.same_bits(out.logprobs[r], logprobs[place])
        bound = 1e-7 * (
            abs(float(largest)) + float((largest - row[ids[-1]].double() / temperature).abs()) + 1
        )
        assert abs(out.logsumexp[r] - (row[ids].double() / temperature).logsumexp(0)) <= bound
        x = row.float().sort(descending=True).values
        largest_by_size = float(x[law_size - 1]) if law_size <= x.numel() else -math.inf
        if largest_by_size < cut or int((row.float() >= cut).sum()) < law_size:
            largest_by_size = -math.inf
        assert float(out.thresholds[r]) == max(cut, largest_by_size)


def random_rows(seed: int, filters: bool) -> inputs.Arguments:
    choice = random.Random(seed)
    batch, vocab_size = choice.randrange(1, 5), choice.choice(VOCAB_SIZES)
    draw = inputs.generator(seed)
    dtype = choice.choice((torch.float32, torch.bfloat16, torch.float16))
    arguments: inputs.Arguments = {
        "logits": filtering.rows(choice, batch, vocab_size, dtype),
        "temperature": (0.3 + torch.rand(batch, generator=draw)) * (torch.rand(batch, generator=draw) < 0.9),
        "seeds": torch.randint(-(2**63), 2**63 - 1, (batch,), generator=draw),
        "positions": torch.randint(0, 2**40, (batch,), generator=draw),
        "law_size": choice.choice((1, 2, 3, 20, 63, 64)),
        "draft_slot": choice.choice((None, 0, 2)),
        "token_dtype": choice.choice((torch.int32, torch.int64)),
    }
    if filters:
        filtering.add_filters(arguments, choice)
    if choice.random() < 0.3:
        row = arguments["logits"][choice.randrange(batch)]
        row[choice.randrange(vocab_size)] = choice.choice((math.nan, math.inf, -math.inf))
    if choice.random() < 0.3:
        indices = [choice.randrange(-1, batch) for _ in range(batch)]
        arguments["request_indices"] = torch.tensor(indices)
    return arguments


@pytest.mark.parametrize("filters", [False, True])
@pytest.mark.parametrize("part", range(4))
def test_the_law_is_that_of_the_largest_logits(native: Implementation, part: int, filters: bool) -> None:
    for seed in range(30 * part, 30 * part + 30):
        arguments = random_rows(seed, filters)
        check_law(native.sample(**arguments), arguments, filters)


@pytest.mark.parametrize("filters", [False, True])
def test_matches_the_reference(native: Implementation, filters: bool) -> None:
    """Tokens too: their thresholds are too few for a draw to fall within rounding of one."""
    for seed in range(100, 130):
        arguments = random_rows(seed, filters)
        if arguments["logits"].dtype == torch.float16:
            arguments["logits"] = arguments["logits"].float()
        if filters:
            # top_p cuts by masses of float32, which the reference does not round.
            arguments.pop("top_p", None)
        out, expected = native.sample(**arguments), use_reference(arguments)
        assert torch.equal(out.token_ids, expected.token_ids), seed
        assert out.support_ids is not None and torch.equal(out.support_ids, expected.support_ids), seed
        assert torch.equal(out.status, expected.status)
        near = torch.isclose(out.support_logprobs, expected.support_logprobs, rtol=2e-6, atol=1e-5)
        assert near.all(), seed


def use_reference(arguments: inputs.Arguments) -> specdec_ops.SampleOutput:
    with use("reference") as reference:
        out: specdec_ops.SampleOutput = reference.sample(**arguments)
        return out


def test_every_tier_and_number_of_threads_has_the_same_bits() -> None:
    threads = torch.get_num_threads()
    try:
        for seed in range(40):
            arguments = random_rows(seed, filters=seed % 2 == 0)
            outs = []
            for tier in available_tiers():
                for count in (1, 3):
                    torch.set_num_threads(count)
                    with use(f"cpu-{tier}") as implementation:
                        outs.append(implementation.sample(**arguments))
            assert all(margins.all_same_bits(outs[0], out) for out in outs[1:]), seed
    finally:
        torch.set_num_threads(threads)


def test_a_real_vocabulary(native: Implementation) -> None:
    draw = inputs.generator(1)
    for dtype in (torch.float32, torch.bfloat16):
        arguments: inputs.Arguments = {
            "logits": (3 * torch.randn(3, 151_936, generator=draw)).to(dtype),
            "temperature": torch.full((3,), 0.8),
            "seeds": 7,
            "positions": torch.arange(3),
            "law_size": 64,
            "top_k": torch.tensor([0, 50, 10]),
            "top_p": torch.tensor([1.0, 0.9, 0.5]),
        }
        check_law(native.sample(**arguments), arguments, filters=True)


# ---- The draw ----


@pytest.mark.parametrize("law_size", [1, 3, 64])
def test_the_draw_goes_by_the_law_that_is_handed_over(native: Implementation, law_size: int) -> None:
    """To within 1e-13 of its edges, while float32 log-probabilities are off by 1e-8 and more."""
    row = torch.randn(1, 300, generator=inputs.generator(5)) * 2
    any_draw = native.sample(row, uniforms=torch.zeros(1), law_size=law_size)
    ids, probs = handed_over(any_draw)
    assert len(ids) == law_size
    edges = np.cumsum(probs) / np.sum(probs)
    uniforms, wanted = [0.0, 1 - 2.0**-53], [ids[0], ids[-1]]
    for i, edge in enumerate(edges[:-1]):
        uniforms += [edge - 1e-13, edge + 1e-13]
        wanted += [ids[i], ids[i + 1]]
    rows = row.expand(len(uniforms), -1)
    out = native.sample(rows, uniforms=torch.tensor(uniforms, dtype=torch.float64), law_size=law_size)
    assert out.token_ids.tolist() == wanted


def test_seeds_draw_by_the_number_of_ids(implementation: Implementation) -> None:
    """53 bits of the position's random words."""
    row = torch.zeros(1, 40)
    for position in range(20):
        out = implementation.sample(
            row, seeds=3, positions=torch.tensor([position]), law_size=40, draft_slot=2
        )
        u = specdec_ops._reference.uniform(3, specdec_ops._reference.Stream.DRAFT, 2, position)
        assert out.token_ids.tolist() == [int(40 * u)]


def test_chi_square_of_the_draw(default_native: Implementation) -> None:
    """p >= 1e-4 at fixed seeds."""
    row = torch.randn(1, 5000, generator=inputs.generator(6)) * 1.5
    count = 60_000
    out = default_native.sample(
        row.expand(count, -1)[:, :5000],
        seeds=torch.arange(count),
        positions=torch.zeros(count).long(),
        law_size=12,
    )
    ids, probs = handed_over(out)
    counts = torch.bincount(out.token_ids, minlength=5000)
    assert int(counts.sum()) == int(counts[ids].sum())
    assert chi_square.p_value(counts[ids].numpy(), np.array(probs) / np.sum(probs)) >= 1e-4


# ---- With verification ----

#: Target and drafter over six ids, of which the drafter keeps two, three, four, or all.
TARGET = test_laws.law(6, 1, 3, 5, 4, 1)
DRAFT = test_laws.law(1, 7, 7, 2, 5, 3)


def read_verification(
    implementation: Implementation, draft_id: int, ids: Tensor, logprobs: Tensor, target: Tensor
) -> tuple[float, list[float]]:
    """The probability that a draft is accepted, and the law of the token in its place, by bisection."""

    def run(coins: Tensor, lasts: Tensor) -> specdec_ops.VerifyChainOutput:
        n = coins.numel()
        out: specdec_ops.VerifyChainOutput = implementation.verify_chain(
            target.expand(2 * n, -1),
            torch.full((n,), draft_id),
            torch.arange(n + 1),
            draft_support_ids=ids.expand(n, -1),
            draft_support_logprobs=logprobs.expand(n, -1),
            accept_uniforms=coins,
            recovered_uniforms=lasts,
        )
        assert (out.status == Status.OK).all()
        return out

    def bisect(test: object) -> float:
        low, high = 0.0, 1.0
        for _ in range(50):
            middle = torch.tensor([(low + high) / 2], dtype=torch.float64)
            if test(middle):  # type: ignore[operator]
                low = float(middle)
            else:
                high = float(middle)
        return high

    zero, most = torch.zeros(1, dtype=torch.float64), torch.full((1,), 1 - 2.0**-53, dtype=torch.float64)
    accepts = lambda coin: int(run(coin, zero).num_accepted) == 1  # noqa: E731
    accept_prob = 1.0 if accepts(most) else bisect(accepts)
    if accept_prob == 1.0:
        return 1.0, [0.0] * target.numel()
    edges = [bisect(lambda u, v=v: int(run(most, u).token_ids[0, 0]) <= v) for v in range(target.numel() - 1)]
    edges = [0.0, *edges, 1.0]
    return accept_prob, [max(b - a, 0.0) for a, b in itertools.pairwise(edges)]


@pytest.mark.parametrize("law_size", [1, 2, 3, 4, 6, 64])
@pytest.mark.parametrize("top_p", [None, 0.8])
def test_drawn_and_verified_tokens_have_the_law_of_the_target(
    native: Implementation, law_size: int, top_p: float | None
) -> None:
    """The joint law over drafts, coins and recovered tokens; off by A * abs(1 / S - 1), and by float32."""
    target, draft = inputs.logits_of([TARGET]), inputs.logits_of([DRAFT])
    out = native.sample(draft, uniforms=torch.zeros(1), law_size=law_size, top_p=top_p)
    ids, probs = handed_over(out)
    emitted = [0.0] * len(TARGET)
    accepted = 0.0
    for x, q in zip(ids, np.array(probs) / np.sum(probs), strict=True):
        accept_prob, recovered = read_verification(native, x, out.support_ids, out.support_logprobs, target)
        emitted[x] += q * accept_prob
        accepted += q * accept_prob
        for v, r in enumerate(recovered):
            emitted[v] += q * (1 - accept_prob) * r
    assert max(abs(e - float(p)) for e, p in zip(emitted, TARGET, strict=True)) < 2e-7
    kept = sum(DRAFT[x] for x in ids)
    overlap = sum(min(TARGET[x], DRAFT[x] / kept) for x in ids)
    assert abs(accepted - float(overlap)) < 2e-7


def test_chi_square_of_drawn_and_verified_tokens(default_native: Implementation) -> None:
    """Chains of two drafts from seeds, both tokens and the bonus: p >= 1e-4."""
    count, k = 30_000, 2
    target, draft = inputs.logits_of([TARGET]), inputs.logits_of([DRAFT])
    positions = torch.full((count,), 11)
    seeds = torch.arange(count)
    drawn = [
        default_native.sample(
            draft.expand(count, -1), seeds=seeds, positions=positions, draft_slot=slot, law_size=3
        )
        for slot in range(k)
    ]
    out = default_native.verify_chain(
        target.expand(count * (k + 1), -1),
        torch.stack([d.token_ids for d in drawn], dim=1).flatten(),
        torch.arange(count + 1) * k,
        draft_support_ids=torch.stack([d.support_ids for d in drawn], dim=1).flatten(0, 1),
        draft_support_logprobs=torch.stack([d.support_logprobs for d in drawn], dim=1).flatten(0, 1),
        seeds=seeds,
        positions=positions,
    )
    probabilities = [float(p) for p in TARGET]
    assert chi_square.p_value(torch.bincount(out.token_ids[:, 0], minlength=6).numpy(), probabilities) >= 1e-4
    second = out.token_ids[:, 1]
    counts = torch.bincount(second[second >= 0], minlength=6)
    assert chi_square.p_value(counts.numpy(), probabilities) >= 1e-4
    lengths = torch.bincount(out.num_accepted, minlength=3).numpy()
    overlap = Fraction(0)
    kept = sum(sorted(DRAFT)[-3:])
    for x in kept_ids(draft[0], -math.inf, 3).tolist():
        overlap += min(TARGET[x], DRAFT[x] / kept)
    a = float(overlap)
    assert chi_square.p_value(lengths, [1 - a, a * (1 - a), a * a]) >= 1e-4


@pytest.mark.parametrize("rule", ["token", "block"])
def test_verification_as_with_rows_that_are_cut(native: Implementation, rule: str) -> None:
    """Acceptance probabilities are those of dense rows with the same law, and no draft row is given."""
    draw = inputs.generator(8)
    batch, vocab_size = 64, 700
    target = 2 * torch.randn(2 * batch, vocab_size, generator=draw)
    draft = target[::2] + 0.7 * torch.randn(batch, vocab_size, generator=draw)
    keys = {"seeds": torch.arange(batch), "positions": torch.full((batch,), 5)}
    temperature = torch.full((batch,), 0.9)
    drawn = native.sample(draft, temperature=temperature, **keys, draft_slot=0, law_size=40)
    common = {
        "target_logits": target,
        "draft_token_ids": drawn.token_ids,
        "cu_num_draft_tokens": torch.arange(batch + 1),
        "temperature": temperature,
        **keys,
        "return_accept_probs": True,
        "rule": rule,
    }
    sparse = native.verify_chain(
        **common, draft_support_ids=drawn.support_ids, draft_support_logprobs=drawn.support_logprobs
    )
    cut = torch.full_like(draft, -math.inf).scatter(1, drawn.support_ids, draft.gather(1, drawn.support_ids))
    dense = native.verify_chain(**common, draft_logits=cut)
    assert torch.allclose(sparse.accept_probs, dense.accept_probs, rtol=1e-6, atol=0)
    assert torch.equal(sparse.num_accepted, dense.num_accepted)
    assert 10 < int(sparse.num_accepted.sum()) < batch
    by_threshold = native.verify_chain(
        **common, draft_logits=draft, draft_logsumexp=drawn.logsumexp, draft_thresholds=drawn.thresholds
    )
    assert torch.allclose(by_threshold.accept_probs, dense.accept_probs, rtol=1e-6, atol=0)


# ---- Sizes, ties, rows without a law ----


def test_one_id_is_the_argmax_and_certain(implementation: Implementation) -> None:
    logits = torch.randn(5, 4500, generator=inputs.generator(9)).round()
    out = implementation.sample(logits, seeds=1, positions=torch.arange(5), law_size=1)
    assert torch.equal(out.token_ids, logits.argmax(1))
    assert torch.equal(out.support_ids, logits.argmax(1)[:, None])
    assert torch.equal(out.support_logprobs, torch.zeros(5, 1))


def test_more_than_there_are(implementation: Implementation) -> None:
    """Fewer columns, fewer that filters keep, fewer that are not masked: padding."""
    logits = torch.tensor([[1.0, 3.0, -math.inf, 2.0, 0.0]])
    for options, expected in (
        ({}, [1, 3, 0, 4, -1, -1, -1]),
        ({"top_k": 2}, [1, 3, -1, -1, -1, -1, -1]),
        ({"vocab_size": 2}, [1, 0, -1, -1, -1, -1, -1]),
        ({"min_p": 0.1}, [1, 3, 0, -1, -1, -1, -1]),
    ):
        out = implementation.sample(logits, seeds=1, positions=torch.tensor([1]), law_size=7, **options)
        assert out.support_ids.tolist() == [expected]
        count = sum(v >= 0 for v in expected)
        assert out.support_logprobs[0, :count].exp().sum().isclose(torch.tensor(1.0))
        assert (out.support_logprobs[0, count:] == -math.inf).all()
        assert int(out.token_ids) in expected[:count]


def test_filters_come_first(implementation: Implementation) -> None:
    """Top-p is of the law before ids are counted: .9 of these keeps five, of which two stay."""
    logits = inputs.logits_of([[0.1, 0.3, 0.2, 0.15, 0.25]])
    out = implementation.sample(logits, seeds=1, positions=torch.tensor([1]), law_size=2, top_p=0.95)
    ids, probs = handed_over(out)
    assert ids == [1, 4] and np.allclose(probs, [0.3 / 0.55, 0.25 / 0.55], rtol=1e-6)
    out = implementation.sample(logits, seeds=1, positions=torch.tensor([1]), law_size=2, top_p=0.25)
    assert handed_over(out)[0] == [1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("vocab_size", [70, 5000, 9000])
def test_ties_at_the_cut_go_to_the_lowest_ids(
    implementation: Implementation, vocab_size: int, dtype: torch.dtype
) -> None:
    """Thousands of them, with a few larger ones at the end; 0.0 and -0.0 tie."""
    logits = torch.zeros(2, vocab_size, dtype=dtype)
    logits[0, ::2] = -0.0
    logits[1] = -0.0
    logits[:, vocab_size - 3 :: 2] = torch.tensor([1.0, 2.0], dtype=dtype)
    logits[1, : vocab_size // 2] = -1.0
    out = implementation.sample(logits, seeds=1, positions=torch.arange(2), law_size=6)
    first, middle = [vocab_size - 1, vocab_size - 3], vocab_size // 2
    assert out.support_ids[0].tolist() == [*first, 0, 1, 2, 3]
    assert out.support_ids[1].tolist() == [*first, middle, middle + 1, middle + 2, middle + 3]
    assert (out.support_logprobs[:, 2:] == out.support_logprobs[:, 2:3]).all()
    assert (out.thresholds == 0).all() and not out.thresholds.signbit().any()


def test_bfloat16_rows_with_many_ties(native: Implementation) -> None:
    draw = inputs.generator(11)
    arguments: inputs.Arguments = {
        "logits": torch.randn(8, 40_000, generator=draw).bfloat16(),
        "temperature": torch.full((8,), 0.7),
        "seeds": torch.arange(8),
        "positions": torch.arange(8),
        "law_size": 64,
    }
    assert (arguments["logits"].sort(descending=True).values[:, 40:90].diff() == 0).any(1).all()
    check_law(native.sample(**arguments), arguments, filters=False)
    arguments["logits"] = arguments["logits"].clamp(max=0.5)
    check_law(native.sample(**arguments), arguments, filters=False)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_without_a_law_hand_over_their_token(implementation: Implementation, temperature: float) -> None:
    nan, inf = math.nan, math.inf
    logits = torch.tensor(
        [[nan, nan, nan], [1.0, nan, 2.0], [1.0, inf, 2.0], [-inf, -inf, -inf], [nan, -inf, nan]]
    )
    options = {"temperature": temperature, "seeds": 1, "positions": torch.arange(5)}
    out = implementation.sample(logits, **options, law_size=3)
    plain = implementation.sample(logits, **options)
    assert all(margins.same_bits(a, b) for a, b in zip(out[:5], plain[:5], strict=True))
    assert out.support_ids.tolist() == [[t, -1, -1] for t in plain.token_ids.tolist()]
    assert out.support_logprobs.tolist() == [[0.0, -inf, -inf]] * 5


def test_greedy_rows_and_rows_of_no_request(implementation: Implementation) -> None:
    logits = torch.randn(3, 9000, generator=inputs.generator(12)).clamp(max=2.0)
    options = {
        "temperature": torch.tensor([0.0, 1.0]),
        "seeds": torch.tensor([4, 5]),
        "positions": torch.arange(3),
        "request_indices": torch.tensor([0, -1, 1]),
    }
    out = implementation.sample(logits, **options, law_size=4)
    plain = implementation.sample(logits, **options)
    for a, b in zip(out[:5], plain[:5], strict=True):
        assert margins.same_bits(a[:2], b[:2])
    assert out.support_ids[:2].tolist() == [[t, -1, -1, -1] for t in logits[:2].argmax(1).tolist()]
    assert out.support_logprobs[:2].tolist() == [[0.0, -math.inf, -math.inf, -math.inf]] * 2
    assert (out.support_ids[2] >= 0).all()


def test_distant_logits_keep_their_place(implementation: Implementation) -> None:
    """A probability that no float64 holds is 0, and such an id is never drawn."""
    logits = torch.tensor([[0.0, -3000.0, 3e38 - 3.4e38, -3.4e38]])
    out = implementation.sample(
        logits, uniforms=torch.full((1,), 1 - 2.0**-53, dtype=torch.float64), law_size=4, temperature=0.5
    )
    assert out.token_ids.tolist() == [0]
    assert out.support_ids.tolist() == [[0, 1, 2, 3]]
    assert out.support_logprobs[0, :2].tolist() == [0.0, -6000.0]


def test_columns_behind_the_vocabulary_never_count(native: Implementation) -> None:
    arguments = random_rows(3, filters=True)
    arguments["logits"] = torch.randn(len(arguments["logits"]), 500, generator=inputs.generator(13))
    expected = native.sample(**arguments)
    for padding in (math.nan, math.inf, 1e30):
        wide = torch.cat([arguments["logits"], torch.full((len(arguments["logits"]), 20), padding)], dim=1)
        assert margins.all_same_bits(native.sample(**{**arguments, "logits": wide}, vocab_size=500), expected)


def test_empty_batch(implementation: Implementation) -> None:
    out = implementation.sample(torch.zeros(0, 5), temperature=0.0, law_size=3, token_dtype=torch.int32)
    assert out.support_ids.shape == out.support_logprobs.shape == (0, 3)
    assert out.support_ids.dtype == torch.int32 and out.support_logprobs.dtype == torch.float32


def test_none_is_returned_unless_asked_for(implementation: Implementation) -> None:
    out = implementation.sample(torch.zeros(2, 5), temperature=0.0)
    assert out.support_ids is None and out.support_logprobs is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"law_size": 0}, r"law_size must be in \[1, 64\], got 0"),
        ({"law_size": 65}, r"law_size must be in \[1, 64\], got 65"),
        ({"sampler": "gumbel"}, "sampler must be 'inverse_cdf' with law_size, got 'gumbel'"),
    ],
)
def test_bad_arguments_are_named(
    default_native: Implementation, change: inputs.Arguments, message: str
) -> None:
    arguments = {"seeds": 1, "positions": torch.arange(2), "law_size": 4}
    with pytest.raises(RuntimeError, match=f"sample: {message}"):
        default_native.sample(torch.zeros(2, 5), **{**arguments, **change})


def test_docstring_example(implementation: Implementation) -> None:
    row = torch.tensor([[0.25, 0.25, 0.5]]).log()
    out = implementation.sample(row, uniforms=torch.tensor([0.7]), law_size=2)
    assert (out.token_ids.tolist(), out.support_ids.tolist()) == ([0], [[2, 0]])
    assert np.allclose(out.support_logprobs.exp(), [[2 / 3, 1 / 3]], rtol=1e-6)
