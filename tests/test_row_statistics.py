"""row_statistics: entropy, margin, largest probability, and how far two rows agree."""

from __future__ import annotations

import math
import random
from fractions import Fraction
from typing import Any

import implementations
import inputs
import margins
import numpy as np
import pytest
import specdec_ops
import torch
from implementations import Implementation
from specdec_ops import Status
from torch import Tensor

INF, NAN = float("inf"), float("nan")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: Around the sizes of lanes and blocks.
VOCAB_SIZES = (1, 2, 7, 255, 256, 257, 4095, 4096, 4097, 9001)
FIELDS = ("max_prob", "margin", "entropy", "accept_prob", "total_variation")


def one(implementation: Implementation, logits: list[float], **options: Any) -> dict[str, float]:
    """The statistics of a row of logits, by name."""
    if "draft_logits" in options:
        options["draft_logits"] = torch.tensor([options["draft_logits"]])
    out = implementation.row_statistics(torch.tensor([logits]), **options)
    return {name: value.item() for name, value in out._asdict().items() if value is not None}


class TestLaws:
    def test_a_row(self, implementation: Implementation) -> None:
        """p = (1/2, 1/4, 1/8, 1/8): 7/4 bits, a margin of ln 2."""
        out = one(implementation, [math.log(p) for p in (0.5, 0.25, 0.125, 0.125)])
        assert out["logsumexp"] == pytest.approx(0.0, abs=1e-7)
        assert out["max_prob"] == pytest.approx(0.5, abs=1e-7)
        assert out["margin"] == pytest.approx(math.log(2), abs=1e-6)
        assert out["entropy"] == pytest.approx(1.75 * math.log(2), abs=1e-6)
        assert out["status"] == Status.OK
        assert "accept_prob" not in out

    def test_at_a_temperature(self, implementation: Implementation) -> None:
        """p = (4/5, 1/5) at 1/2 of the temperature of (2/3, 1/3)."""
        out = one(implementation, [math.log(2), 0.0], temperature=0.5)
        assert out["max_prob"] == pytest.approx(0.8, abs=1e-6)
        assert out["margin"] == pytest.approx(math.log(4), abs=1e-6)
        assert out["logsumexp"] == pytest.approx(math.log(5), abs=1e-6)
        assert out["entropy"] == pytest.approx(-0.8 * math.log(0.8) - 0.2 * math.log(0.2), abs=1e-6)

    @pytest.mark.parametrize(
        ("p", "q", "accepted"),
        [
            ((2, 1, 1), (4, 10, 6), Fraction(7, 10)),
            ((1, 2), (2, 1), Fraction(2, 3)),
            ((1, 0), (0, 1), Fraction(0)),
            ((3, 5), (3, 5), Fraction(1)),
        ],
    )
    def test_goldens_of_pairs(
        self, implementation: Implementation, p: tuple[int, ...], q: tuple[int, ...], accepted: Fraction
    ) -> None:
        target, draft = inputs.logits_of([p]).tolist()[0], inputs.logits_of([q]).tolist()[0]
        out = one(implementation, target, draft_logits=draft)
        assert out["accept_prob"] == pytest.approx(float(accepted), abs=1e-6)
        assert out["total_variation"] == pytest.approx(float(1 - accepted), abs=1e-6)

    def test_acceptance_is_that_of_verify_chain(self, native: Implementation) -> None:
        """The mean over the draft law of the acceptance probabilities that it reports."""
        draw = inputs.generator(1)
        target, draft = torch.randn(2, 40, generator=draw), torch.randn(1, 40, generator=draw)
        for t, draft_t in ((1.0, 1.0), (0.6, 1.3), (0.0, 0.8), (0.9, 0.0)):
            kwargs = {"temperature": t, "draft_logits": draft, "draft_temperature": draft_t}
            stats = native.row_statistics(target[:1], **kwargs)
            law = (draft.double() / draft_t).softmax(-1)[0] if draft_t else torch.zeros(40).double()
            if not draft_t:
                law[draft.argmax()] = 1.0
            chances = [
                native.verify_chain(
                    target,
                    torch.tensor([x]),
                    torch.tensor([0, 1]),
                    temperature=t,
                    draft_logits=draft,
                    draft_temperature=torch.tensor([draft_t]),
                    seeds=1,
                    positions=torch.tensor([0]),
                    return_accept_probs=True,
                ).accept_probs.item()
                for x in range(40)
            ]
            mean = float((law * torch.tensor(chances, dtype=torch.float64)).sum())
            assert stats.accept_prob.item() == pytest.approx(mean, abs=1e-6)
            assert stats.total_variation.item() == pytest.approx(1 - mean, abs=1e-6)

    def test_logsumexp_is_that_of_sample(self, native: Implementation) -> None:
        logits = 4 * torch.randn(5, 9000, generator=inputs.generator(3))
        for dtype in DTYPES:
            rows, t = logits.to(dtype), torch.tensor([1.0, 0.7, 0.0, 3.0, INF])
            got = native.row_statistics(rows, temperature=t).logsumexp
            want = native.sample(rows, temperature=t, seeds=1, positions=torch.arange(5)).logsumexp
            assert torch.equal(got, want)

    def test_ties_have_no_margin(self, implementation: Implementation) -> None:
        assert one(implementation, [1.0, 3.0, 3.0])["margin"] == 0.0
        assert one(implementation, [0.0, -0.0])["margin"] == 0.0
        assert math.copysign(1.0, one(implementation, [-0.0, 0.0])["margin"]) == 1.0

    def test_ties_of_different_blocks_and_lanes(self, native: Implementation) -> None:
        for first in (0, 300, 5000, 8999):
            for second in (1, 301, 4096, 8998):
                logits = torch.zeros(1, 9000)
                logits[0, first], logits[0, second] = 5.0, 4.5
                assert native.row_statistics(logits).margin.item() == 0.5

    def test_a_uniform_law_at_an_infinite_temperature(self, implementation: Implementation) -> None:
        out = one(implementation, [3.0, -2.0, 0.0, -INF], temperature=INF)
        assert out["entropy"] == pytest.approx(math.log(3), abs=1e-6)
        assert out["max_prob"] == pytest.approx(1 / 3, abs=1e-6)


class TestGreedy:
    def test_statistics_are_those_at_temperature_1(self, implementation: Implementation) -> None:
        logits = [1.0, 3.0, 2.0]
        for t in (0.0, -1.0, NAN, 9e-6):
            assert one(implementation, logits, temperature=t) == one(implementation, logits)

    @pytest.mark.parametrize(
        ("t", "draft_t", "accepted"),
        [(0.0, 0.0, 0.0), (0.0, 1.0, 0.3), (1.0, 0.0, 0.25), (1.0, 1.0, 0.75)],
    )
    def test_pairs(self, implementation: Implementation, t: float, draft_t: float, accepted: float) -> None:
        """p = (1/4, 1/4, 1/2), q = (1/5, 1/2, 3/10)."""
        target = inputs.logits_of([(0.25, 0.25, 0.5)]).tolist()[0]
        draft = inputs.logits_of([(0.2, 0.5, 0.3)]).tolist()[0]
        out = one(implementation, target, temperature=t, draft_logits=draft, draft_temperature=draft_t)
        assert out["accept_prob"] == pytest.approx(accepted, abs=1e-6)
        assert out["total_variation"] == pytest.approx(1 - accepted, abs=1e-6)

    def test_equal_argmaxes(self, implementation: Implementation) -> None:
        """The lowest of equal ids, on both sides."""
        out = one(implementation, [1.0, 2.0, 2.0], temperature=0.0, draft_logits=[0.0, 9.0, 9.0])
        assert (out["accept_prob"], out["total_variation"]) == (1.0, 0.0)

    def test_argmaxes_of_later_blocks(self, native: Implementation) -> None:
        for place in (0, 255, 256, 4096, 9000):
            logits = torch.zeros(1, 9001)
            logits[0, place:] = 1.0
            draft = torch.zeros(1, 9001)
            draft[0, place] = 2.0
            out = native.row_statistics(logits, temperature=0.0, draft_logits=draft)
            assert out.accept_prob.item() == 1.0

    @pytest.mark.parametrize("draft", [[NAN, 1.0, 0.0], [NAN] * 3, [-INF] * 3, [INF, 0.0, NAN]])
    def test_a_greedy_drafter_s_row_needs_no_law(
        self, implementation: Implementation, draft: list[float]
    ) -> None:
        out = one(implementation, [0.0, 0.0, 0.0], draft_logits=draft, draft_temperature=0.0)
        assert out["status"] == Status.OK
        assert out["accept_prob"] == pytest.approx(1 / 3, abs=1e-6)


class TestAwkwardRows:
    @pytest.mark.parametrize(
        ("logits", "status", "logsumexp"),
        [
            ([1.0, NAN], Status.NON_FINITE_TARGET, NAN),
            ([INF, 0.0], Status.NON_FINITE_TARGET, NAN),
            ([NAN, NAN], Status.NON_FINITE_TARGET, NAN),
            ([-INF, -INF], Status.MASKED_TARGET, -INF),
        ],
    )
    def test_rows_without_a_law(
        self, implementation: Implementation, logits: list[float], status: Status, logsumexp: float
    ) -> None:
        for t in (1.0, 0.0):
            out = one(implementation, logits, temperature=t, draft_logits=[0.0, 0.0])
            assert out["status"] == status
            assert out["logsumexp"] == pytest.approx(logsumexp, nan_ok=True)
            assert all(math.isnan(out[name]) for name in FIELDS)

    @pytest.mark.parametrize("draft", [[NAN, 0.0], [INF, 0.0], [-INF, -INF], [2e9, 2e9], [-2e9, -2e9]])
    def test_draft_rows_without_a_law(self, implementation: Implementation, draft: list[float]) -> None:
        for t in (1.0, 0.0):
            out = one(implementation, [0.0, 0.0], temperature=t, draft_logits=draft, draft_temperature=1.0)
            assert out["status"] == Status.UNUSABLE_DRAFT_LAW
            assert out["entropy"] == pytest.approx(math.log(2), abs=1e-6)
            assert math.isnan(out["accept_prob"])
            assert math.isnan(out["total_variation"])

    def test_one_id_is_left(self, implementation: Implementation) -> None:
        out = one(implementation, [-INF, 2.0, -INF])
        assert (out["max_prob"], out["margin"], out["entropy"]) == (1.0, INF, 0.0)
        assert one(implementation, [5.0])["margin"] == INF

    def test_large_logits(self, implementation: Implementation) -> None:
        out = one(implementation, [3e30, 3e30, -3e38])
        assert out["entropy"] == pytest.approx(math.log(2), abs=1e-6)
        assert (out["max_prob"], out["margin"]) == (pytest.approx(0.5, abs=1e-6), 0.0)

    def test_a_masked_block(self, native: Implementation) -> None:
        logits = torch.zeros(1, 9000)
        logits[0, 4096:8192] = -INF
        out = native.row_statistics(logits, draft_logits=torch.zeros(1, 9000))
        assert out.entropy.item() == pytest.approx(math.log(9000 - 4096), abs=1e-5)
        assert out.accept_prob.item() == pytest.approx((9000 - 4096) / 9000, abs=1e-6)


class TestRows:
    @pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
    def test_rows_that_are_named(self, implementation: Implementation, dtype: torch.dtype) -> None:
        logits = torch.randn(4, 50, generator=inputs.generator(1))
        draft = torch.randn(5, 50, generator=inputs.generator(2))
        indices = torch.tensor([3, 0, 0, 2, 1], dtype=dtype)
        t = torch.tensor([1.0, 0.5, 2.0, 0.0, 1.0])
        got = implementation.row_statistics(logits, temperature=t, draft_logits=draft, row_indices=indices)
        want = implementation.row_statistics(logits[indices.long()], temperature=t, draft_logits=draft)
        assert margins.all_same_bits(got, want)

    def test_no_row(self, implementation: Implementation) -> None:
        logits = torch.zeros(2, 4)
        out = implementation.row_statistics(
            logits, draft_logits=torch.zeros(3, 4), row_indices=torch.tensor([1, -1, 0])
        )
        assert out.status.tolist() == [0, 0, 0]
        for name in ("logsumexp", *FIELDS):
            assert getattr(out, name).isnan().tolist() == [False, True, False]

    @pytest.mark.parametrize("shape", [(0, 5), (0, 1)])
    def test_empty(self, implementation: Implementation, shape: tuple[int, int]) -> None:
        out = implementation.row_statistics(torch.zeros(shape), draft_logits=torch.zeros(shape))
        assert all(value.shape == (0,) for value in out)
        assert implementation.row_statistics(torch.zeros(shape)).accept_prob is None

    def test_padding_columns_do_not_count(self, implementation: Implementation) -> None:
        logits = torch.randn(3, 40, generator=inputs.generator(5))
        draft = torch.randn(3, 30, generator=inputs.generator(6))
        want = implementation.row_statistics(logits[:, :30].contiguous(), draft_logits=draft)
        logits[:, 30:] = NAN
        got = implementation.row_statistics(logits, draft_logits=draft, vocab_size=30)
        assert margins.all_same_bits(got, want)

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_strides_and_offsets_do_not_matter(
        self, implementation: Implementation, dtype: torch.dtype
    ) -> None:
        draw = inputs.generator(7)
        logits = torch.randn(3, 4200, generator=draw).to(dtype)
        draft = torch.randn(3, 4200, generator=draw).to(dtype)
        want = implementation.row_statistics(logits, draft_logits=draft)
        for gap, offset in ((0, 0), (3, 1), (8, 8)):
            got = implementation.row_statistics(
                inputs.strided(logits, gap, offset, NAN), draft_logits=inputs.strided(draft, offset, gap, NAN)
            )
            assert margins.all_same_bits(got, want)
        rows = logits[:1].expand(3, -1)
        got = implementation.row_statistics(rows, draft_logits=draft)
        want = implementation.row_statistics(rows.contiguous(), draft_logits=draft)
        assert margins.all_same_bits(got, want)

    def test_inputs_are_not_written(self, implementation: Implementation) -> None:
        logits, draft = torch.randn(2, 300), torch.randn(2, 300)
        copies = logits.clone(), draft.clone()
        implementation.row_statistics(logits, draft_logits=draft)
        assert torch.equal(logits, copies[0])
        assert torch.equal(draft, copies[1])


def random_arguments(seed: int) -> dict[str, Any]:
    """Rows, or pairs of rows, of any dtypes, some of them no laws."""
    choice, draw = random.Random(seed), inputs.generator(seed)
    vocab_size, num_rows = choice.choice(VOCAB_SIZES), choice.randint(1, 4)
    scale = choice.choice((0.1, 3.0, 12.0))
    logits = scale * torch.randn(num_rows, vocab_size, generator=draw)
    draft = logits + choice.choice((0.01, 1.0, 5.0)) * torch.randn(num_rows, vocab_size, generator=draw)
    dtype = choice.choice(DTYPES)
    arguments: dict[str, Any] = {"logits": logits.to(dtype)}
    temperatures = (1.0, 0.7, 0.0, INF, 5.0, 0.01, NAN)
    arguments["temperature"] = torch.tensor([choice.choice(temperatures) for _ in range(num_rows)])
    if choice.random() < 0.7:
        arguments["draft_logits"] = draft.to(choice.choice((dtype, *DTYPES)))
        if choice.random() < 0.5:
            arguments["draft_temperature"] = torch.tensor(
                [choice.choice(temperatures) for _ in range(num_rows)]
            )
    for rows in (arguments["logits"], arguments.get("draft_logits")):
        if rows is not None and choice.random() < 0.3:
            row = rows[choice.randrange(num_rows)]
            if choice.random() < 0.2:
                row.fill_(-INF)
            row[choice.randrange(vocab_size)] = choice.choice((NAN, INF, -INF))
    if choice.random() < 0.2:
        arguments["vocab_size"] = max(1, vocab_size - 3)
    return arguments


#: Rounding of the weights and of float32 outputs; of the entropy, in nats, and the margin.
TOLERANCE = {"max_prob": 1e-6, "margin": 1e-6, "entropy": 5e-6, "accept_prob": 1e-6, "total_variation": 2e-6}


@pytest.mark.parametrize("seed", range(60))
def test_matches_reference(native: Implementation, seed: int) -> None:
    arguments = random_arguments(seed)
    got = native.row_statistics(**arguments)
    want = implementations.REFERENCE.row_statistics(**arguments)
    assert torch.equal(got.status, want.status)
    torch.testing.assert_close(got.logsumexp, want.logsumexp, rtol=3e-7, atol=1e-6, equal_nan=True)
    for name in FIELDS:
        a, b = getattr(got, name), getattr(want, name)
        if b is None:
            assert a is None
            continue
        torch.testing.assert_close(a, b, rtol=1e-6, atol=TOLERANCE[name], equal_nan=True)


def test_small_numbers_keep_their_digits(native: Implementation) -> None:
    """A chance of 6e-9 to five digits; an entropy of 9e-8 as far as the rounding of a sum by 1 lets it."""
    target, draft = [20.0, 0.0, 0.0], [0.0, 0.0, 20.0]
    out = one(native, target, draft_logits=draft)
    p = np.exp(np.array(target) - 20)
    p /= p.sum()
    assert out["accept_prob"] == pytest.approx(float(3 * p[1]), rel=1e-5)
    assert out["entropy"] == pytest.approx(float(-(p * np.log(p)).sum()), abs=1e-7, rel=0)


def test_equal_rows_agree(native: Implementation) -> None:
    logits = 3 * torch.randn(4, 9000, generator=inputs.generator(4))
    out = native.row_statistics(logits, draft_logits=logits)
    assert torch.all(out.total_variation == 0)
    assert torch.all(out.accept_prob > 1 - 1e-6)
    assert torch.all(out.accept_prob <= 1)
    logits = 3 * torch.randn(300, 40, generator=inputs.generator(5))
    out = native.row_statistics(logits, draft_logits=logits)
    assert torch.all(out.accept_prob <= 1)
    assert out.accept_prob.double().mean() > 1 - 1e-6


def test_every_tier_gives_the_same_bits() -> None:
    for seed in range(100, 160):
        arguments = random_arguments(seed)
        results = []
        for name in implementations.native_cpu_names():
            with implementations.use(name) as tier:
                results.append(tier.row_statistics(**arguments))
        assert all(margins.all_same_bits(result, results[0]) for result in results), seed


def test_threads_and_neighbours_do_not_change_a_bit(
    default_native: Implementation, num_threads: None
) -> None:
    logits = torch.randn(40, 5000, generator=inputs.generator(8))
    draft = logits + torch.randn(40, 5000, generator=inputs.generator(9))
    torch.set_num_threads(1)
    want = default_native.row_statistics(logits, draft_logits=draft)
    for threads in (2, 5):
        torch.set_num_threads(threads)
        assert margins.all_same_bits(default_native.row_statistics(logits, draft_logits=draft), want)
    alone = default_native.row_statistics(logits[7:8], draft_logits=draft[7:8])
    assert margins.all_same_bits(alone, type(want)(*(value[7:8] for value in want)))


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "dtype": (
        {"logits": torch.zeros(2, 4, dtype=torch.float64)},
        "logits must be float32, bfloat16 or float16, got float64",
    ),
    "shape": ({"logits": torch.zeros(2, 4, 1)}, r"logits must be \[rows, width\], got shape \[2, 4, 1\]"),
    "columns": (
        {"logits": torch.zeros(4, 2).t()},
        "logits must have a contiguous last dimension, got stride 2",
    ),
    "no columns": ({"logits": torch.zeros(2, 0)}, "logits must have at least one column"),
    "vocab_size": (
        {"vocab_size": 5},
        "vocab_size must be between 1 and the width of logits, 4, got 5",
    ),
    "temperature": (
        {"temperature": torch.ones(3)},
        r"temperature must be \[num_rows\] with 2 elements, got shape \[3\]",
    ),
    "temperature dtype": (
        {"temperature": torch.ones(2, dtype=torch.float64)},
        "temperature must be float32, got float64",
    ),
    "draft rows": (
        {"draft_logits": torch.zeros(3, 4)},
        r"draft_logits must be \[num_rows, width\] with 2 rows, got shape \[3, 4\]",
    ),
    "draft columns": (
        {"draft_logits": torch.zeros(2, 3)},
        "draft_logits must have at least vocab_size = 4 columns, got 3",
    ),
    "draft dtype": (
        {"draft_logits": torch.zeros(2, 4, dtype=torch.int32)},
        "draft_logits must be float32, bfloat16 or float16, got int32",
    ),
    "draft temperature alone": (
        {"draft_temperature": 1.0},
        "draft_temperature must be given with draft_logits, got it alone",
    ),
    "draft temperature": (
        {"draft_logits": torch.zeros(2, 4), "draft_temperature": torch.ones(1)},
        r"draft_temperature must be \[num_rows\] with 2 elements, got shape \[1\]",
    ),
    "draft temperature dtype": (
        {"draft_logits": torch.zeros(2, 4), "draft_temperature": torch.ones(2).half()},
        "draft_temperature must be float32, got float16",
    ),
    "index": (
        {"row_indices": torch.tensor([0, 2])},
        r"row_indices must be in \[-1, 2\), got 2 at index 1",
    ),
    "negative index": (
        {"row_indices": torch.tensor([-2])},
        r"row_indices must be in \[-1, 2\), got -2 at index 0",
    ),
    "indices": (
        {"row_indices": torch.zeros(1, 1, dtype=torch.int64)},
        r"row_indices must be \[num_rows\], got shape \[1, 1\]",
    ),
    "real indices": ({"row_indices": torch.zeros(1)}, "row_indices must be int32 or int64, got float32"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments_are_named(default_native: Implementation, case: str) -> None:
    with pytest.raises(RuntimeError, match=f"^row_statistics: {BAD[case][1]}"):
        default_native.row_statistics(**{"logits": torch.zeros(2, 4), **BAD[case][0]})


def test_opcheck() -> None:
    op = specdec_ops.row_statistics.__globals__["_op"]
    logits: Tensor = torch.randn(3, 20)
    torch.library.opcheck(op, (logits, torch.ones(3)))
    torch.library.opcheck(op, (logits, torch.ones(3)), {"draft_logits": torch.randn(3, 20)})
