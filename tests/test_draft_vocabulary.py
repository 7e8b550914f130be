"""map_draft_tokens and expand_draft_logits: drafters with a vocabulary of their own."""

from __future__ import annotations

import math
import random
from typing import Any

import implementations
import inputs
import margins
import pytest
import specdec_ops
import torch
from implementations import Implementation
from torch import Tensor

INF, NAN = float("inf"), float("nan")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class TestIds:
    @pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
    @pytest.mark.parametrize("map_dtype", [torch.int32, torch.int64])
    def test_target_ids_and_offsets(
        self, implementation: Implementation, dtype: torch.dtype, map_dtype: torch.dtype
    ) -> None:
        ids = torch.tensor([2, 0, 1, -1, 3, -9, 2**31 - 1], dtype=dtype)
        targets = torch.tensor([4, 5, 9], dtype=map_dtype)
        want = [9, 4, 5, -1, -1, -1, -1]
        got = implementation.map_draft_tokens(ids, targets)
        assert (got.tolist(), got.dtype) == (want, dtype)
        offsets = targets - torch.arange(3, dtype=map_dtype)
        assert implementation.map_draft_tokens(ids, offsets, offsets=True).tolist() == want

    def test_many_to_one_and_negative_targets(self, implementation: Implementation) -> None:
        assert implementation.map_draft_tokens(torch.arange(4), torch.tensor([7, 7, -1, -5])).tolist() == [
            7,
            7,
            -1,
            -1,
        ]

    def test_shapes_and_strides(self, implementation: Implementation) -> None:
        ids = torch.arange(24).reshape(2, 3, 4)
        d2t = (torch.arange(48) * 3)[::2]
        want = ids * 6
        assert torch.equal(implementation.map_draft_tokens(ids, d2t), want)
        assert torch.equal(implementation.map_draft_tokens(ids.mT, d2t), want.mT)
        assert torch.equal(implementation.map_draft_tokens(ids[..., ::2], d2t), want[..., ::2])
        assert implementation.map_draft_tokens(torch.tensor(3), d2t).tolist() == 18

    def test_empty(self, implementation: Implementation) -> None:
        none = torch.zeros(0, 3, dtype=torch.int64)
        assert implementation.map_draft_tokens(none, torch.arange(4)).shape == (0, 3)
        assert implementation.map_draft_tokens(torch.tensor([0]), none[:, 0]).tolist() == [-1]


class TestRows:
    def test_logits_go_to_their_target_ids(self, implementation: Implementation) -> None:
        logits = torch.tensor([[1.0, 2.0, 3.0], [NAN, INF, -INF]])
        got = implementation.expand_draft_logits(logits, torch.tensor([4, 0, 2]), 5)
        want = torch.tensor([[2.0, -INF, 3.0, -INF, 1.0], [INF, -INF, -INF, -INF, NAN]])
        assert margins.same_bits(got, want)
        offsets = torch.tensor([4, -1, 0])
        got = implementation.expand_draft_logits(logits, offsets, 5, offsets=True)
        assert margins.same_bits(got, want)

    @pytest.mark.parametrize("t", [1.0, 0.5, 3.0])
    def test_probabilities_of_ids_that_share_a_target_are_added(
        self, implementation: Implementation, t: float
    ) -> None:
        """The law of the long row is the scatter-add of that of the short one."""
        draw = inputs.generator(1)
        logits, d2t = 3 * torch.randn(4, 50, generator=draw), torch.randint(0, 20, (50,), generator=draw)
        rows = implementation.expand_draft_logits(logits, d2t, 30, temperature=t)
        law = (logits.double() / t).softmax(-1)
        want = torch.zeros(4, 30, dtype=torch.float64).index_add(1, d2t, law)
        torch.testing.assert_close((rows.double() / t).softmax(-1), want, rtol=2e-6, atol=1e-12)

    def test_a_greedy_row_keeps_the_largest(self, implementation: Implementation) -> None:
        logits = torch.tensor([[1.0, 2.0, 0.0]]).repeat(3, 1)
        t = torch.tensor([0.0, NAN, 1.0])
        got = implementation.expand_draft_logits(logits, torch.tensor([1, 1, 0]), 2, temperature=t)
        assert got[:2].tolist() == [[0.0, 2.0]] * 2
        assert got[2].tolist() == pytest.approx([0.0, 2 + math.log1p(math.exp(-1))], abs=1e-6)

    @pytest.mark.parametrize(
        ("values", "want"),
        [
            ((NAN, INF), NAN),
            ((INF, 1.0), INF),
            ((-INF, -INF), -INF),
            ((-INF, 1.5), 1.5),
            ((1.0, NAN), NAN),
        ],
    )
    def test_what_is_no_number_among_ids_that_share_a_target(
        self, implementation: Implementation, values: tuple[float, float], want: float
    ) -> None:
        for order in (values, values[::-1]):
            got = implementation.expand_draft_logits(torch.tensor([order]), torch.tensor([0, 0]), 1)
            assert got.item() == pytest.approx(want, nan_ok=True)

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("out_dtype", DTYPES)
    def test_dtypes(self, implementation: Implementation, dtype: torch.dtype, out_dtype: torch.dtype) -> None:
        logits = torch.randn(2, 40, generator=inputs.generator(2)).to(dtype)
        d2t = torch.randperm(60, generator=inputs.generator(3))[:40]
        got = implementation.expand_draft_logits(logits, d2t, 60, dtype=out_dtype)
        want = torch.full((2, 60), -INF, dtype=out_dtype)
        want[:, d2t] = logits.to(out_dtype)
        assert got.dtype == out_dtype
        assert torch.equal(got, want)

    def test_strides_and_padding_columns(self, implementation: Implementation) -> None:
        logits, d2t = torch.randn(3, 40, generator=inputs.generator(4)), torch.arange(30).flip(0)
        want = implementation.expand_draft_logits(logits[:, :30].contiguous(), d2t, 33)
        expanded = torch.zeros(3, 50)[:, 5:38]
        implementation.expand_draft_logits_(
            inputs.strided(logits, 3, 1, NAN), torch.stack([d2t, d2t], 1)[:, 1], expanded=expanded
        )
        assert torch.equal(expanded, want)
        assert expanded._base is not None
        assert expanded._base[:, :5].eq(0).all()
        assert expanded._base[:, 38:].eq(0).all()

    def test_empty(self, implementation: Implementation) -> None:
        none = torch.zeros(0, dtype=torch.int64)
        assert implementation.expand_draft_logits(torch.zeros(0, 4), torch.arange(4), 9).shape == (0, 9)
        got = implementation.expand_draft_logits(torch.zeros(2, 4), none, 3)
        assert got.eq(-INF).all()
        assert implementation.expand_draft_logits(torch.zeros(2, 0), none, 0).shape == (2, 0)


@pytest.mark.parametrize("many_to_one", [False, True])
def test_verification_over_the_target_s_vocabulary(native: Implementation, many_to_one: bool) -> None:
    """A drafter with 40 of 300 ids: the acceptance of each draft is that of the scattered law."""
    draw = inputs.generator(5)
    d2t = torch.randperm(300, generator=draw)[:40]
    if many_to_one:
        d2t[20:] = d2t[:20]
    logits, target = torch.randn(40, 40, generator=draw), torch.randn(80, 300, generator=draw)
    t = torch.full((40,), 0.8)
    drafts = native.sample(
        logits, temperature=t, seeds=torch.arange(40), positions=torch.zeros(40).long(), draft_slot=0
    )
    ids = native.map_draft_tokens(drafts.token_ids, d2t)
    chain = {
        "target_logits": target,
        "draft_token_ids": ids,
        "cu_num_draft_tokens": torch.arange(41),
        "temperature": t,
        "seeds": torch.arange(40),
        "positions": torch.zeros(40).long(),
        "return_accept_probs": True,
    }
    rows = native.expand_draft_logits(logits, d2t, 300, temperature=t)
    dense = native.verify_chain(**chain, draft_logits=rows, draft_logsumexp=drafts.logsumexp)
    law = torch.zeros(40, 300, dtype=torch.float64).index_add(1, d2t, (logits.double() / 0.8).softmax(-1))
    p = (target[::2].double() / 0.8).softmax(-1).gather(1, ids[:, None])
    want = (p / law.gather(1, ids[:, None])).clamp(max=1.0).squeeze(1).float()
    torch.testing.assert_close(dense.accept_probs, want, rtol=3e-6, atol=0)
    assert dense.status.eq(0).all()
    # The same law as a sparse one, whose ids are mapped and nothing else.
    sparse = native.verify_chain(
        **chain,
        draft_support_ids=native.map_draft_tokens(torch.arange(40).expand(40, 40), d2t),
        draft_support_logprobs=(logits.double() / 0.8).log_softmax(-1).float(),
    )
    torch.testing.assert_close(sparse.accept_probs, want, rtol=3e-6, atol=0)


def test_laws_of_the_likeliest_ids_over_the_target_s_vocabulary(native: Implementation) -> None:
    """Ids of a law are mapped like drafts; padding stays, and two ids of one target are added up."""
    logits = torch.tensor([[3.0, 1.0, 2.5, -9.0], [0.0, 0.0, -INF, 0.0]])
    d2t = torch.tensor([7, 2, 7, 9])
    target = torch.randn(4, 12, generator=inputs.generator(7))
    keys = {"seeds": torch.arange(2), "positions": torch.zeros(2).long()}
    drawn = native.sample(logits, uniforms=torch.tensor([0.0, 0.5]), law_size=4)
    assert drawn.token_ids.tolist() == [0, 1]
    assert drawn.support_ids.tolist() == [[0, 2, 1, 3], [0, 1, 3, -1]]
    ids = native.map_draft_tokens(drawn.support_ids, d2t)
    assert ids.tolist() == [[7, 7, 2, 9], [7, 2, 9, -1]]
    out = native.verify_chain(
        target,
        native.map_draft_tokens(drawn.token_ids, d2t),
        torch.arange(3),
        draft_support_ids=ids,
        draft_support_logprobs=drawn.support_logprobs,
        **keys,
        return_accept_probs=True,
    )
    q = torch.stack([logits[0].softmax(0)[[0, 2]].sum(), torch.tensor(1 / 3)])
    p = target[::2].softmax(-1).gather(1, torch.tensor([[7], [2]])).squeeze(1)
    torch.testing.assert_close(out.accept_probs, (p / q).clamp(max=1.0), rtol=3e-6, atol=0)


def random_arguments(seed: int) -> dict[str, Any]:
    choice, draw = random.Random(seed), inputs.generator(seed)
    size, vocab_size = choice.choice((0, 1, 2, 40, 257, 1500)), choice.choice((1, 2, 40, 300, 2100))
    rows = choice.randint(1, 4)
    logits = choice.choice((0.1, 3.0, 30.0)) * torch.randn(rows, size + choice.choice((0, 5)), generator=draw)
    logits = logits.to(choice.choice(DTYPES))
    for row in logits:
        if len(row) and choice.random() < 0.3:
            row[torch.rand(len(row), generator=draw) < 0.1] = choice.choice((NAN, INF, -INF))
    offsets = choice.random() < 0.5
    d2t = torch.randint(0, vocab_size, (size,), generator=draw)
    if choice.random() < 0.3:
        d2t = torch.zeros(size, dtype=torch.int64)
    return {
        "draft_logits": logits,
        "d2t": (d2t - torch.arange(size) * offsets).to(choice.choice((torch.int32, torch.int64))),
        "offsets": offsets,
        "temperature": torch.tensor([choice.choice((1.0, 0.7, 0.0, 5.0, 0.01)) for _ in range(rows)]),
        "expanded": torch.zeros(rows, vocab_size, dtype=choice.choice(DTYPES)),
    }


@pytest.mark.parametrize("seed", range(40))
def test_matches_reference(implementation: Implementation, seed: int) -> None:
    arguments, wanted = random_arguments(seed), random_arguments(seed)
    implementation.expand_draft_logits_(**arguments)
    implementations.REFERENCE.expand_draft_logits_(**wanted)
    got, want = arguments["expanded"], wanted["expanded"]
    # A rounding to float32, and one to the dtype, which may go the other way.
    digit = 2.0**-23 + torch.finfo(got.dtype).eps
    torch.testing.assert_close(got.float(), want.float(), rtol=digit, atol=1e-6, equal_nan=True)


BAD_MAPS: dict[str, tuple[dict[str, Any], str]] = {
    "ids": ({"draft_token_ids": torch.zeros(2)}, "draft_token_ids must be int32 or int64, got float32"),
    "map": ({"d2t": torch.zeros(2)}, "d2t must be int32 or int64, got float32"),
    "map's shape": (
        {"d2t": torch.zeros(2, 2, dtype=torch.int64)},
        r"d2t must be \[draft_vocab_size\], got shape \[2, 2\]",
    ),
    "no tensor": ({"draft_token_ids": 3}, "draft_token_ids must be a tensor, got int"),
}


@pytest.mark.parametrize("case", BAD_MAPS)
def test_bad_maps_are_named(default_native: Implementation, case: str) -> None:
    arguments = {"draft_token_ids": torch.tensor([0]), "d2t": torch.arange(2), **BAD_MAPS[case][0]}
    with pytest.raises(RuntimeError, match=f"^map_draft_tokens: {BAD_MAPS[case][1]}"):
        default_native.map_draft_tokens(**arguments)


BAD_ROWS: dict[str, tuple[dict[str, Any], str]] = {
    "dtype": (
        {"draft_logits": torch.zeros(2, 3).double()},
        "draft_logits must be float32, bfloat16 or float16, got float64",
    ),
    "shape": (
        {"draft_logits": torch.zeros(2, 3, 1)},
        r"draft_logits must be \[rows, draft_vocab_size\], got shape \[2, 3, 1\]",
    ),
    "columns": (
        {"draft_logits": torch.zeros(3, 2).t()},
        "draft_logits must have a contiguous last dimension, got stride 2",
    ),
    "long map": (
        {"d2t": torch.zeros(4, dtype=torch.int64)},
        "d2t must have at most one element for each column of draft_logits, 3, got 4",
    ),
    "target": ({"d2t": torch.tensor([0, 5])}, r"d2t must lead into \[0, 5\), got 5 for draft id 1"),
    "offset": (
        {"d2t": torch.tensor([0, -2]), "offsets": True},
        r"d2t must lead into \[0, 5\), got -1 for draft id 1",
    ),
    "temperature": (
        {"temperature": torch.ones(3)},
        r"temperature must be \[rows\] with 2 elements, got shape \[3\]",
    ),
    "temperature dtype": (
        {"temperature": torch.ones(2).half()},
        "temperature must be float32, got float16",
    ),
    "expanded": (
        {"expanded": torch.zeros(3, 5)},
        r"expanded must be \[rows, vocab_size\] with 2 rows, got shape \[3, 5\]",
    ),
    "expanded dtype": (
        {"expanded": torch.zeros(2, 5).double()},
        "expanded must be float32, bfloat16 or float16, got float64",
    ),
}


@pytest.mark.parametrize("case", BAD_ROWS)
def test_bad_rows_are_named(default_native: Implementation, case: str) -> None:
    arguments = {
        "draft_logits": torch.zeros(2, 3),
        "d2t": torch.arange(3),
        "expanded": torch.zeros(2, 5),
        **BAD_ROWS[case][0],
    }
    with pytest.raises(RuntimeError, match=f"^expand_draft_logits_: {BAD_ROWS[case][1]}"):
        default_native.expand_draft_logits_(**arguments)


def test_opcheck() -> None:
    op = specdec_ops.map_draft_tokens.__globals__["_op"]
    torch.library.opcheck(op, (torch.tensor([1, 0]), torch.tensor([5, 6])))
    expand = specdec_ops.expand_draft_logits.__globals__["_op"]
    rows: Tensor = torch.zeros(2, 5)
    torch.library.opcheck(expand, (torch.randn(2, 3), torch.arange(3), torch.ones(2), False, rows))
