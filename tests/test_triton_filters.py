"""Filters of the chain ops in Triton on small shapes: rows are cut where the native kernels cut them."""

from __future__ import annotations

import math
import random
from typing import Any

import filtering
import inputs
import margins
import pytest
import specdec_ops
import torch
from implementations import Implementation
from random_chains import EXTRAS
from specdec_ops import triton as specdec_triton
from test_triton_chain import check

INF, NAN = math.inf, math.nan
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
WAYS = ("largest chunks", "passes", "passes over more blocks than fit")


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How thresholds are searched for; with a GPU there is no compiling anew for the last."""
    if not specdec_triton.is_interpreted() and request.param != WAYS[0]:
        pytest.skip("for the interpreter")
    import triton.language as tl
    from specdec_ops.triton import _filters

    if request.param == WAYS[1]:
        monkeypatch.setitem(_filters.SEARCH, "TILE", 2)
    if request.param == WAYS[2]:
        for name, value in {"_MOST_BLOCKS": 0, "_MOST_CHUNKS": 64}.items():
            monkeypatch.setattr(_filters, name, tl.constexpr(value))
    return str(request.param)


def check_sample(triton: Implementation, arguments: inputs.Arguments) -> None:
    here, there = triton.sample(**arguments), specdec_ops.sample(**arguments)
    assert margins.same_bits(here.thresholds, there.thresholds), (here.thresholds, there.thresholds)
    check(here, there)


@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
@pytest.mark.parametrize("vocab_size", [7, 4_200])
def test_rows_of_all_kinds_are_cut_where_the_native_kernels_cut_them(
    triton: Implementation, way: str, vocab_size: int, dtype: torch.dtype
) -> None:
    if way != WAYS[0] and dtype == F16:
        pytest.skip("takes long")
    choice = random.Random(vocab_size + 10 * WAYS.index(way) + dtype.itemsize)
    size = 4 if way == WAYS[0] else 2
    arguments: inputs.Arguments = {"logits": filtering.rows(choice, size, vocab_size, dtype)}
    arguments["temperature"] = 0.3 + torch.rand(size, generator=inputs.generator(1))
    filtering.add_filters(arguments, choice)
    check_sample(triton, arguments | {"uniforms": torch.rand(size, generator=inputs.generator(2))})


@pytest.mark.parametrize(
    "filters",
    [
        {"top_k": 50, "top_p": 0.9},
        {"top_k": 50, "top_p": 0.9, "filter_order": "joint"},
        {"top_k": 2_000, "top_p": 0.6},
        {"top_k": 9_000},
        {"min_p": 1e-4, "top_p": 0.97},
        {"top_p": 0.0},
    ],
    ids=str,
)
def test_rows_of_more_chunks_than_are_looked_at_at_once(
    triton: Implementation, filters: dict[str, Any]
) -> None:
    # Of 141 chunks; the second row has ties in all of them.
    random_row = 2 * torch.randn(9_001, generator=inputs.generator(3))
    rows = torch.stack([random_row, random_row.round()]).to(BF16)
    check_sample(triton, {"logits": rows, "uniforms": torch.tensor([0.3, 0.9]), **filters})


@pytest.mark.parametrize("order", ["sequential", "joint"])
def test_what_top_p_is_of(triton: Implementation, way: str, order: str) -> None:
    """Ids in chunks of their own; the second row has fewer of them than top-k."""
    rows = torch.full((3, 300), -INF, dtype=BF16)
    rows[:, ::64] = torch.tensor([0.30, 0.25, 0.24, 0.11, 0.10]).log().to(BF16)
    arguments = {"top_k": torch.tensor([3, 7, 4]), "top_p": torch.tensor([0.35, 1.0, 0.65])}
    arguments |= {"min_p": torch.tensor([0.0, 0.0, 0.5]), "filter_order": order}
    out = triton.sample(rows, uniforms=torch.zeros(3), **arguments)
    kept = [(row >= threshold).sum().item() for row, threshold in zip(rows, out.thresholds, strict=True)]
    assert kept == ([1, 300, 2] if order == "sequential" else [2, 300, 3])
    assert out.thresholds[1] == -INF


def test_min_p_keeps_from_the_least_float_on(triton: Implementation) -> None:
    draw = inputs.generator(6)
    rows = torch.randn(9, 5, generator=draw)
    check_sample(triton, {
        "logits": rows, "temperature": 0.2 + torch.rand(9, generator=draw), "uniforms": torch.zeros(9),
        "min_p": torch.tensor([1e-40, 1e-3, 0.03, 0.1, 0.2, 0.5, 0.7, 1.0, 2.0]),
    })  # fmt: skip


@pytest.mark.parametrize("order", ["sequential", "joint"])
def test_a_mass_that_is_just_enough_is_enough(triton: Implementation, way: str, order: str) -> None:
    # Logits of -n weigh 2^-n at this temperature; the two halves are in blocks of their own.
    rows = torch.full((2, 4_100), -INF)
    rows[:, 4_098] = 0.0
    rows[:, 5] = rows[:, 70] = -1.0
    # One unit more than the half, of what the last id adds.
    rows[1, 99] = -40.0
    arguments = {"top_p": 0.5, "temperature": math.log2(math.e), "filter_order": order}
    if order == "sequential":
        arguments["min_p"] = 2.0**-41
    out = triton.sample(rows, uniforms=torch.zeros(2), **arguments)
    assert out.thresholds.tolist() == [0.0, -1.0]


def test_rows_without_a_law_and_greedy_ones_are_whole(triton: Implementation) -> None:
    logits = torch.randn(6, 70, generator=inputs.generator(8))
    logits[0, 3], logits[1, 66], logits[2] = NAN, INF, -INF
    arguments = {"logits": logits, "temperature": torch.tensor([1.0, 1.0, 1.0, 0.0, NAN, 1.0])}
    arguments |= {"request_indices": torch.tensor([0, 1, 2, 3, 4, -1]), "seeds": torch.arange(6)}
    arguments |= {"positions": torch.arange(6), "top_k": 3, "min_p": 0.3}
    check_sample(triton, arguments)
    assert triton.sample(**arguments).thresholds.tolist() == [-INF] * 6


DRAFT_FILTERS = {
    "logits": {
        "draft_top_k": torch.tensor([9, 0], dtype=torch.int32),
        "draft_top_p": torch.tensor([NAN, 0.8]),
        "draft_min_p": torch.tensor([1e-3, 0.0]),
    },
    "logits_and_logsumexp": {"draft_thresholds": torch.tensor([-1.0, NAN, 2.0])},
}


@pytest.mark.parametrize("filtered", ["target", "drafts", "both"])
@pytest.mark.parametrize("law", inputs.DRAFT_LAWS)
def test_verify_chain_gives_the_native_results(triton: Implementation, law: str, filtered: str) -> None:
    of_drafts = DRAFT_FILTERS.get(law, {})
    if filtered != "target" and not of_drafts:
        pytest.skip("there is nothing to filter")
    arguments = inputs.chain([2, 1], 40, law, noise=2.0, uniforms=True, dtype=BF16)
    if filtered != "drafts":
        arguments |= {"top_k": torch.tensor([12, 3]), "top_p": torch.tensor([0.9, 0.8])}
    if filtered != "target":
        arguments |= of_drafts
    check(triton.verify_chain(**arguments, **EXTRAS), specdec_ops.verify_chain(**arguments, **EXTRAS))


@pytest.mark.parametrize("law", ["one_hot", "logits", "probs", "support"])
def test_verify_chain_draws_what_the_native_kernels_draw(triton: Implementation, law: str) -> None:
    arguments = inputs.chain([1, 0], 4_300, law, seed=1, noise=2.0, dtype=BF16)
    arguments |= {"top_k": torch.tensor([12, 3]), "top_p": torch.tensor([0.9, 0.8])}
    arguments |= DRAFT_FILTERS.get(law, {})
    check(triton.verify_chain(**arguments), specdec_ops.verify_chain(**arguments))


def test_thresholds_of_drafts_that_are_read(triton: Implementation) -> None:
    """In entries, in another dtype than the target, without a logsumexp; one masks all, one nothing."""
    kept, _ = inputs.entries(
        "logits", indices=[3, 0], counts=[2, 1], max_requests=4, k=2, vocab_size=90, seed=5, uniforms=True
    )
    kept["temperature"] = torch.full((4,), 0.9)
    kept["draft_thresholds"] = torch.tensor([[0.5, NAN], [NAN, NAN], [NAN, NAN], [-0.5, INF]])
    kept["draft_logits"] = kept["draft_logits"].to(BF16)
    for filters in ({}, {"top_k": torch.tensor([0, 9, 9, 5]), "min_p": torch.tensor([0.1, 0.0, 0.0, 0.0])}):
        arguments = kept | filters
        check(triton.verify_chain(**arguments, **EXTRAS), specdec_ops.verify_chain(**arguments, **EXTRAS))


def test_a_masked_draft_that_is_accepted_all_the_same_has_no_probability(triton: Implementation) -> None:
    arguments = inputs.chain([1], 40, "logits", seed=2, uniforms=True)
    arguments["draft_token_ids"][0] = arguments["target_logits"][0].argmin()
    arguments |= {"top_k": 2, "draft_top_k": 2, "accept_rates": torch.ones(1)}
    here, there = triton.verify_chain(**arguments, **EXTRAS), specdec_ops.verify_chain(**arguments, **EXTRAS)
    assert here.num_accepted.tolist() == [1] and here.logprobs[0, 0] == -INF
    check(here, there)


@pytest.mark.parametrize(
    ("law", "uniforms"),
    [("one_hot", False), ("logits", False), ("logits", True), ("probs", True), ("support", True)],
)
def test_recovered_tokens_are_what_filters_and_the_residual_keep(
    triton: Implementation, law: str, uniforms: bool
) -> None:
    arguments = inputs.chain([1] * 3, 300, law, seed=4, temperature=0.9, noise=0.8, dtype=BF16)
    rows = arguments["target_logits"][::2]
    left_out = ["target_logits", "cu_num_draft_tokens"] + ["seeds", "positions"] * uniforms
    rest = {name: value for name, value in arguments.items() if name not in left_out}
    rest |= {"uniforms": torch.tensor([0.3, 0.7, 1 - 1e-6], dtype=torch.float64)} if uniforms else {}
    rest |= {"top_k": 6, "top_p": 0.95} | ({"draft_top_k": 4} if law == "logits" else {})
    there = specdec_ops.sample_recovered(rows, **rest)
    check(triton.sample_recovered(rows, **rest), there)
    kept = rows >= rows.topk(6).values[:, -1:]
    assert bool(kept.gather(1, there.token_ids[:, None].long()).all())


def test_what_filters_take_from_drafts_is_recovered(triton: Implementation) -> None:
    """Of two equal laws the draft's is cut to its first id, so all others keep what they weigh."""
    rows = torch.randn(3, 40, generator=inputs.generator(7)).to(BF16)
    arguments = {"draft_token_ids": rows.argmax(1), "draft_logits": rows.clone(), "draft_top_k": 1}
    arguments |= {"seeds": torch.arange(3), "positions": torch.arange(3)}
    check(triton.sample_recovered(rows, **arguments), specdec_ops.sample_recovered(rows, **arguments))


def test_the_draft_is_not_drawn_again_where_its_chunk_is_cut(triton: Implementation) -> None:
    """The draft weighs nearly all of what is left; others of its chunk weigh more together, but are cut."""
    logits = torch.full((2, 200), 1.0, dtype=BF16)
    logits[:, 70], logits[:, 100] = 15.0, 2.0
    arguments = {"seeds": torch.arange(2), "positions": torch.arange(2), "top_k": 2}
    arguments["draft_token_ids"] = torch.full((2,), 70)
    assert triton.sample_recovered(logits, **arguments).token_ids.tolist() == [100] * 2


def test_what_sample_returns_spares_the_pass_over_draft_rows(triton: Implementation) -> None:
    arguments = inputs.chain([1], 300, "logits", seed=1, scale=2.0, uniforms=True, dtype=BF16)
    filters = {"top_k": 20, "top_p": 0.9}
    drawn = triton.sample(
        arguments["draft_logits"],
        temperature=arguments["temperature"],
        seeds=1,
        positions=torch.arange(1),
        **filters,
    )
    arguments["draft_token_ids"] = drawn.token_ids
    handed = {"draft_logsumexp": drawn.logsumexp, "draft_thresholds": drawn.thresholds}
    there = specdec_ops.verify_chain(**arguments, draft_top_k=20, draft_top_p=0.9, **EXTRAS)
    check(triton.verify_chain(**arguments, **handed, **EXTRAS), there)
