"""Top-k, top-p and min-p: where rows are cut, and that everything else is as on rows that were cut before."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import filtering
import inputs
import margins
import pytest
import random_chains
import torch
from filtering import masked, threshold_of
from implementations import Implementation
from specdec_ops import Status, rules
from torch import Tensor

INF, NAN = math.inf, math.nan
SMALL = [size for size in random_chains.VOCAB_SIZES if size < 30_000]
LARGE = (70_000, 151_936)
Filter = dict[str, Any]


def kept(implementation: Implementation, law: list[float], **filters: Any) -> list[int]:
    """Which ids of a law may be drawn."""
    n = 256
    logits = inputs.logits_of([law] * n)
    out = implementation.sample(logits, uniforms=torch.arange(n) / n, **filters)
    return sorted(set(out.token_ids.tolist()))


# --- which ids are kept -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ({"top_k": 3, "top_p": 0.35}, [0]),
        ({"top_k": 3, "top_p": 0.35, "filter_order": "joint"}, [0, 1]),
        ({"top_k": 2}, [0, 1]),
        ({"top_p": 0.5}, [0, 1]),
        ({"top_p": 0.6}, [0, 1, 2]),
        ({"min_p": 0.5}, [0, 1, 2]),
        ({"min_p": 0.82}, [0, 1]),
        ({"min_p": 0.5, "top_k": 4, "top_p": 0.65}, [0, 1]),
        ({"min_p": 0.5, "top_k": 4, "top_p": 0.65, "filter_order": "joint"}, [0, 1, 2]),
        ({"min_p": 0.82, "top_k": 4}, [0, 1]),
        ({"min_p": 0.1, "top_k": 1, "top_p": 0.99}, [0]),
    ],
    ids=str,
)
def test_which_ids_are_kept(implementation: Implementation, filters: Filter, expected: list[int]) -> None:
    assert kept(implementation, [0.30, 0.25, 0.24, 0.11, 0.10], **filters) == expected


@pytest.mark.parametrize(
    ("order", "expected"), [("sequential", [0, 1, 2]), ("joint", [0, 1, 2, 3])], ids=["sequential", "joint"]
)
def test_top_p_of_what_top_k_leaves_is_of_less_than_one(
    implementation: Implementation, order: str, expected: list[int]
) -> None:
    law = [0.35, 0.25, 0.20, 0.05, 0.045, 0.04, 0.035, 0.03]
    assert kept(implementation, law, top_k=4, top_p=0.82, filter_order=order) == expected
    assert kept(implementation, law, top_k=1, top_p=0.8, filter_order=order) == [0]


def test_ties_of_the_last_id_are_kept(implementation: Implementation) -> None:
    law = [0.1, 0.2, 0.3, 0.2, 0.2]
    for filters in ({"top_k": 2}, {"top_p": 0.35}, {"min_p": 0.6}):
        assert kept(implementation, law, **filters) == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "none",
    [
        *({"top_k": k} for k in (0, -1, 5, 6, 2**31 - 1)),
        *({"top_p": p} for p in (1.0, 1.5, INF, NAN)),
        *({"min_p": p} for p in (0.0, -0.5, -INF, NAN)),
    ],
    ids=str,
)
def test_values_that_filter_nothing(implementation: Implementation, none: Filter) -> None:
    logits = torch.randn(8, 5, generator=inputs.generator(1))
    drawn = {"seeds": 3, "positions": torch.arange(8)}
    plain, out = implementation.sample(logits, **drawn), implementation.sample(logits, **drawn, **none)
    assert margins.all_same_bits(plain, out)
    assert out.thresholds.tolist() == [-INF] * 8


@pytest.mark.parametrize(
    "one",
    [{"top_k": 1}, {"top_p": 0.0}, {"top_p": -1.0}, {"top_p": 1e-40}, {"min_p": 1.0}, {"min_p": 2.0}],
    ids=str,
)
def test_the_largest_is_always_kept(implementation: Implementation, one: Filter) -> None:
    assert kept(implementation, [0.3, 0.4, 0.3], **one) == [1]


def test_ids_that_are_masked_are_not_counted(implementation: Implementation) -> None:
    law = [0.0, 0.6, 0.0, 0.4, 0.0]
    for filters in ({"top_k": 3}, {"top_p": 0.99}, {"min_p": 1e-30}):
        assert kept(implementation, law, **filters) == [1, 3]


def test_temperature_comes_before_top_p_and_min_p(implementation: Implementation) -> None:
    law = [0.5, 0.3, 0.2]
    hot = torch.full((256,), 4.0)
    assert kept(implementation, law, top_p=0.5) == [0]
    assert kept(implementation, law, top_p=0.5, temperature=hot) == [0, 1]
    assert kept(implementation, law, min_p=0.7) == [0]
    assert kept(implementation, law, min_p=0.7, temperature=hot) == [0, 1, 2]


def test_each_request_has_filters_of_its_own(implementation: Implementation) -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]]).repeat(4, 1)
    out = implementation.sample(
        logits,
        uniforms=torch.zeros(4),
        top_k=torch.tensor([1, 3, 0, 4], dtype=torch.int32),
        min_p=torch.tensor([0.0, 0.3, 0.3, 0.0]),
    )
    assert out.token_ids.tolist() == [3, 2, 2, 0]
    assert abs(float(out.logsumexp[0]) - 3.0) < 1e-6


# --- thresholds by the definition, and what comes of them -------------------------------------------------


def check_sample(native: Implementation, arguments: inputs.Arguments, context: str) -> None:
    logits, temperature = arguments["logits"], arguments["temperature"]
    indices = arguments.get("request_indices")
    thresholds = []
    for r, row in enumerate(logits):
        entry = r if indices is None else int(indices[r])
        filters = filtering.filters_at(arguments, max(entry, 0))
        thresholds.append(threshold_of(row, float(temperature[entry]) if entry >= 0 else 0.0, filters))
    cut = torch.stack([masked(row, t) for row, t in zip(logits, thresholds, strict=True)])
    left_out = (*filtering.NAMES, "filter_order")
    plain = {name: value for name, value in arguments.items() if name not in left_out}
    expected = native.sample(**{**plain, "logits": cut})
    actual = native.sample(**arguments)
    assert margins.same_bits(actual.thresholds, torch.tensor(thresholds)), context
    assert margins.all_same_bits(actual[:4], expected[:4]), context


def test_sample_is_that_of_rows_that_were_cut_before(native: Implementation) -> None:
    for seed in range(25 if native.name == "cpu-scalar" else 150):
        check_sample(native, *random_chains.for_sample(seed, SMALL, filters=True))


def test_large_rows_with_more_ids_at_the_threshold_than_are_gathered_at_once(
    default_native: Implementation,
) -> None:
    for seed in range(16):
        check_sample(default_native, *random_chains.for_sample(seed, LARGE, filters=True))


@pytest.mark.parametrize(
    ("tiny", "counts"), [(-30.0, True), (-40.0, True), (-40.9, True), (-41.0, False), (-42.0, False)]
)
def test_masses_are_whole_multiples_of_a_unit(native: Implementation, tiny: float, counts: bool) -> None:
    # At this temperature a logit of -n weighs 2^-n: the first id has half of the mass, but for one unit.
    row = torch.tensor([[0.0, -1.0, -1.0, tiny]])
    out = native.sample(row, temperature=math.log2(math.e), uniforms=torch.zeros(1), top_p=0.5)
    assert out.thresholds.item() == (-1.0 if counts else 0.0)


@pytest.mark.parametrize("dtype", random_chains.DTYPES, ids=str)
@pytest.mark.parametrize("order", ["sequential", "joint"])
def test_flat_and_tied_rows_of_many_blocks(
    default_native: Implementation, dtype: torch.dtype, order: str
) -> None:
    n = 50_000
    draw = inputs.generator(3)
    rows = torch.stack(
        [
            torch.zeros(n),
            torch.randn(n, generator=draw) * 0.01,
            torch.randn(n, generator=draw).round(),
            torch.linspace(-4, 4, n),
            torch.linspace(4, -4, n),
            1e-38 * torch.randn(n, generator=draw),
        ]
    ).to(dtype)
    for filters in (
        {"top_k": 7000},
        {"top_p": 0.97},
        {"top_k": 30_000, "top_p": 0.6},
        {"min_p": 0.1, "top_p": 0.8},
    ):
        size = rows.shape[0]
        arguments: inputs.Arguments = {"logits": rows, "temperature": torch.ones(size), "filter_order": order}
        arguments |= {"uniforms": torch.rand(size, generator=draw), **filters}
        check_sample(default_native, arguments, f"{filters}")


@pytest.mark.parametrize("option", random_chains.FILTERS)
def test_verify_chain_is_that_of_rows_that_were_cut_before(native: Implementation, option: str) -> None:
    for seed in range(10 if native.name == "cpu-scalar" else 30):
        arguments, flags, context = random_chains.random_chain_with(option, seed, SMALL)
        actual = native.verify_chain(**arguments, **flags)
        expected = native.verify_chain(**filtering.unfiltered_chain(arguments), **flags)
        assert margins.all_same_bits(actual, expected), context


def test_sample_recovered_is_that_of_rows_that_were_cut_before(native: Implementation) -> None:
    changed = 0
    for seed in range(25 if native.name == "cpu-scalar" else 100):
        arguments, context = random_chains.for_sample_recovered(seed, SMALL, filters=True)
        actual = native.sample_recovered(**arguments)
        cut = filtering.unfiltered_drafts(arguments)
        assert margins.all_same_bits(actual, native.sample_recovered(**cut)), context
        raw = {name: arguments[name] for name in cut}
        changed += not margins.all_same_bits(actual, native.sample_recovered(**raw))
    assert changed >= 10


RULES = {
    "block": "block",
    "exact_match": "exact_match",
    "lenience": rules.Lenience(0.7),
    "typical": rules.Typical(),
    "top_n": rules.TopN(3, 0.2),
    "thresholds": rules.Thresholds(0.4, 0.8),
    "margin": rules.Margin(0.5),
}


@pytest.mark.parametrize("rule", RULES)
def test_under_every_rule_it_is_that_of_rows_that_were_cut_before(native: Implementation, rule: str) -> None:
    for seed in range(4 if native.name == "cpu-scalar" else 12):
        arguments, flags, context = random_chains.random_chain_with("filters", seed, SMALL)
        flags = {**flags, "rule": RULES[rule]}
        actual = native.verify_chain(**arguments, **flags)
        expected = native.verify_chain(**filtering.unfiltered_chain(arguments), **flags)
        assert margins.all_same_bits(actual, expected), context


def test_typical_acceptance_takes_the_entropy_of_what_filters_leave(implementation: Implementation) -> None:
    """Of 0.6 and 0.4 it sets a bar above 0.4; the ids that are filtered out would lower it."""
    row = torch.tensor([0.6, 0.4, *[0.3] * 200]).log()
    accepted = [
        implementation.verify_chain(
            row.repeat(2, 1),
            torch.tensor([draft]),
            torch.tensor([0, 1]),
            top_k=2,
            rule=rules.Typical(epsilon=1.0, delta=0.9),
            seeds=1,
            positions=torch.tensor([0]),
        ).num_accepted.tolist()
        for draft in (0, 1)
    ]
    assert accepted == [[1], [0]]


@pytest.mark.parametrize(("filters", "accepted"), [({}, 1), ({"top_k": 2}, 0), ({"top_k": 1}, 0)], ids=str)
def test_top_n_takes_the_probabilities_of_what_filters_leave(
    implementation: Implementation, filters: Filter, accepted: int
) -> None:
    """The two most probable ids are 0.2 apart, and 0.25 once they are alone."""
    row = torch.tensor([0.2, 0.5, 0.3]).log()
    out = implementation.verify_chain(
        row.repeat(2, 1),
        torch.tensor([2]),
        torch.tensor([0, 1]),
        rule=rules.TopN(2, 0.22),
        seeds=1,
        positions=torch.tensor([0]),
        **filters,
    )
    assert out.num_accepted.tolist() == [accepted]
    assert out.token_ids[0, 0] == (2 if accepted else 1)


def test_gumbel_noise_meets_what_filters_leave(native: Implementation) -> None:
    for seed in range(8):
        arguments, _ = random_chains.for_sample(seed, SMALL, filters=True)
        for name in ("uniforms", "request_indices"):
            arguments.pop(name, None)
        batch = arguments["logits"].shape[0]
        arguments |= {"seeds": torch.arange(batch), "positions": torch.arange(batch), "sampler": "gumbel"}
        filtered = native.sample(**arguments)
        cut = torch.where(
            arguments["logits"].float() < filtered.thresholds[:, None], -INF, arguments["logits"].float()
        ).to(arguments["logits"].dtype)
        plain = {n: v for n, v in arguments.items() if n not in (*filtering.NAMES, "filter_order")}
        expected = native.sample(**{**plain, "logits": cut})
        assert margins.all_same_bits(filtered[:4], expected[:4])


@pytest.mark.parametrize(
    ("law", "filtered"),
    [
        ("logits", "target"),
        ("logits", "drafts"),
        ("logits", "both"),
        ("probs", "target"),
        ("support", "target"),
    ],
)
def test_recovered_tokens_by_a_pass_over_both_rows(native: Implementation, law: str, filtered: str) -> None:
    rejected = 0
    for seed, vocab_size in enumerate((256, 1000, 4096, 8192, 9001)):
        dtype = random_chains.DTYPES[seed % 3]
        arguments = inputs.chain(
            [1] * 12, vocab_size, law, seed=seed, dtype=dtype, scale=1.0, noise=2.0, uniforms=True
        )
        if filtered != "drafts":
            arguments |= {"top_k": vocab_size // 4, "top_p": 0.9}
        if filtered != "target":
            arguments |= {"draft_top_k": vocab_size // 4, "draft_min_p": 0.01}
        for r, best in enumerate(arguments["target_logits"][::2].float().argsort(descending=True)[:, 9]):
            arguments["draft_token_ids"][r] = best
        arguments["accept_uniforms"] = torch.full_like(arguments["accept_uniforms"], 1 - 2.0**-20)
        actual = native.verify_chain(**arguments, **random_chains.EXTRAS)
        expected = native.verify_chain(**filtering.unfiltered_chain(arguments), **random_chains.EXTRAS)
        rejected += int((actual.num_accepted == 0).sum())
        assert margins.all_same_bits(actual, expected)
    assert rejected >= 5


def test_a_request_alone_is_cut_by_several_threads(default_native: Implementation, num_threads: None) -> None:
    for filters in ({"top_k": 50, "top_p": 0.9}, {"top_p": 0.97}, {"top_k": 9000}):
        arguments = inputs.chain([3], 100_000, "logits", seed=5, scale=2.0)
        arguments |= {f"draft_{name}": value for name, value in filters.items()} | filters
        results = []
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            results.append(default_native.verify_chain(**arguments, **random_chains.EXTRAS))
        assert margins.all_same_bits(results[0], results[1])
        assert margins.all_same_bits(results[0], results[2])


def test_probabilities_of_what_is_kept_agree_with_float64(native: Implementation) -> None:
    # Not by the definition of masses: a nucleus is checked where no sum is within rounding of P.
    for seed in range(60):
        draw = inputs.generator(seed)
        row = 3 * torch.randn(2000, generator=draw)
        p = float(torch.rand(1, generator=draw))
        law = row.double().softmax(0).sort(descending=True).values
        prefix = law.cumsum(0)
        if (prefix - float(torch.tensor(p))).abs().min() < 1e-6:
            continue
        size = int((prefix < p).sum()) + 1
        out = native.sample(row[None], uniforms=torch.zeros(1), top_p=p)
        assert int((row >= out.thresholds[0]).sum()) == size
        expected = row.double().sort(descending=True).values[:size].logsumexp(0)
        assert abs(float(out.logsumexp[0]) - float(expected)) < 1e-6


# --- laws ---------------------------------------------------------------------------------------------------


def law_of_chain(implementation: Implementation, p: Tensor, q: Tensor, **filters: Any) -> Tensor:
    """The law of the first emitted token: drafts drawn from q with all coins and draws on a grid."""
    size, steps = p.numel(), 64
    grid = (torch.arange(steps) + 0.5) / steps
    law = torch.zeros(size, dtype=torch.float64)
    coins, draws = (values.flatten() for values in torch.meshgrid(grid, grid, indexing="ij"))
    n = coins.numel()
    for x in (q > 0).nonzero().flatten().tolist():
        out = implementation.verify_chain(
            p.log().float().repeat(2 * n, 1),
            torch.full((n,), x),
            torch.arange(n + 1),
            accept_uniforms=coins,
            recovered_uniforms=draws,
            max_num_draft_tokens=1,
            **filters,
        )
        law += float(q[x]) * torch.bincount(out.token_ids[:, 0], minlength=size) / n
    return law


@pytest.mark.parametrize("order", ["sequential", "joint"])
def test_the_first_token_has_the_filtered_law(native: Implementation, order: str) -> None:
    p = torch.tensor([0.30, 0.25, 0.24, 0.11, 0.10], dtype=torch.float64)
    raw = torch.tensor([0.1, 0.4, 0.2, 0.25, 0.05], dtype=torch.float64)
    q = torch.where(raw >= 0.2, raw, 0.0)
    q = q / q.sum()
    filters = {"top_k": 3, "top_p": 0.6, "filter_order": order}
    expected = torch.where(p >= (0.25 if order == "sequential" else 0.24), p, 0.0)
    expected = expected / expected.sum()
    n = 64 * 64
    law = law_of_chain(native, p, q, **filters, draft_logits=raw.log().float().repeat(n, 1), draft_top_k=3)
    assert (law - expected).abs().max() < 2 / 64
    assert (law[expected == 0] == 0).all()


@pytest.mark.parametrize("order", ["sequential", "joint"])
@pytest.mark.parametrize("draft_law", ["logits", "thresholds", "probs", "one_hot"])
def test_recovered_tokens_have_the_law_of_what_filters_leave(
    implementation: Implementation, draft_law: str, order: str
) -> None:
    """Each edge of norm([p - q]+), from both sides."""
    p = torch.tensor([0.30, 0.25, 0.24, 0.11, 0.10], dtype=torch.float64)
    raw = torch.tensor([0.1, 0.4, 0.2, 0.25, 0.05], dtype=torch.float64)
    kept_p = torch.where(p >= (0.25 if order == "sequential" else 0.24), p, 0.0)
    kept_q = torch.where(raw >= 0.2, raw, 0.0)
    told: Filter = {
        "logits": {"draft_logits": raw.log().float()[None], "draft_top_k": 3},
        "thresholds": {"draft_logits": raw.log().float()[None], "draft_thresholds": torch.tensor([-1.7])},
        "probs": {"draft_probs": (kept_q / kept_q.sum()).float()[None]},
        "one_hot": {},
    }[draft_law]
    for x in (1, 2, 3):
        q = torch.eye(5, dtype=torch.float64)[x] if draft_law == "one_hot" else kept_q / kept_q.sum()
        law = (kept_p / kept_p.sum() - q).clamp(min=0)
        edges = (law / law.sum()).cumsum(0)
        for v in range(5):
            for below in (True, False):
                u = float(edges[v]) + (-1e-5 if below else 1e-5)
                if not 0 <= u < 1:
                    continue
                out = implementation.sample_recovered(
                    p.log().float()[None],
                    torch.tensor([x]),
                    uniforms=torch.tensor([u], dtype=torch.float64),
                    top_k=3,
                    top_p=0.6,
                    filter_order=order,
                    **told,
                )
                assert out.status.tolist() == [Status.OK]
                token = int(out.token_ids[0])
                assert law[token] > 0 and (token <= v) == below


def test_a_raw_law_of_filtered_drafts_would_be_another(native: Implementation) -> None:
    # huggingface/transformers#47932: drafts are drawn from a filtered law, but the raw one is told.
    p = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
    raw = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
    q = torch.tensor([0.625, 0.375, 0.0, 0.0], dtype=torch.float64)
    told = {"draft_logits": raw.log().float().repeat(64 * 64, 1)}
    assert (law_of_chain(native, p, q, **told, draft_top_k=2) - p).abs().max() < 2 / 64
    wrong = torch.tensor([0.5, 0.375, 0.0625, 0.0625], dtype=torch.float64)
    assert (law_of_chain(native, p, q, **told) - wrong).abs().max() < 2 / 64


def test_drafts_that_the_target_filters_out_are_rejected_by_every_coin(
    implementation: Implementation,
) -> None:
    # vllm#56724, #42744: such drafts have p = 0, at a bonus row and at a draft's alike.
    p = torch.tensor([[0.6, 0.25, 0.15]]).log().repeat(2, 1)
    for coin, draw in itertools.product((0.0, 0.5), (0.0, 0.9)):
        out = implementation.verify_chain(
            p,
            torch.tensor([1]),
            torch.tensor([0, 1]),
            min_p=0.5,
            accept_uniforms=torch.tensor([coin]),
            recovered_uniforms=torch.tensor([draw]),
            return_accept_probs=True,
            return_logprobs=True,
        )
        assert out.num_accepted.tolist() == [0] and out.token_ids[0, 0] == 0
        assert out.accept_probs is not None and out.accept_probs.tolist() == [0.0]
        assert out.logprobs is not None and abs(float(out.logprobs[0, 0])) < 1e-15


def test_a_request_without_drafts_gets_the_token_of_sample(implementation: Implementation) -> None:
    logits = 3 * torch.randn(16, 500, generator=inputs.generator(2))
    filters = {"top_k": 40, "top_p": 0.8, "min_p": 0.01}
    drawn = {"seeds": 11, "positions": torch.arange(16)}
    sampled = implementation.sample(logits, **drawn, **filters)
    out = implementation.verify_chain(
        logits, torch.zeros(0, dtype=torch.int64), torch.zeros(17, dtype=torch.int64), **drawn, **filters
    )
    assert out.token_ids[:, 0].tolist() == sampled.token_ids.tolist()


# --- draft laws ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", random_chains.DTYPES, ids=str)
def test_what_sample_returns_spares_the_pass_over_draft_rows(
    native: Implementation, dtype: torch.dtype
) -> None:
    filters = {"top_k": 20, "top_p": 0.9}
    of_drafts = {f"draft_{name}": value for name, value in filters.items()}
    for seed in range(8):
        arguments = inputs.chain([3] * 6, 5000, "logits", seed=seed, dtype=dtype, scale=2.0)
        temperature = arguments["temperature"].repeat_interleave(3)
        drawn = native.sample(
            arguments["draft_logits"],
            temperature=temperature,
            seeds=seed,
            positions=torch.arange(18),
            **filters,
        )
        arguments["draft_token_ids"] = drawn.token_ids
        handed = {"draft_logsumexp": drawn.logsumexp, "draft_thresholds": drawn.thresholds}
        expected = native.verify_chain(**arguments, **of_drafts, **random_chains.EXTRAS)
        assert (expected.status == Status.OK).all()
        assert margins.all_same_bits(
            expected, native.verify_chain(**arguments, **handed, **random_chains.EXTRAS)
        )
        handed.pop("draft_logsumexp")
        assert margins.all_same_bits(
            expected, native.verify_chain(**arguments, **handed, **random_chains.EXTRAS)
        )


def test_a_draft_that_its_own_filters_leave_out_has_no_usable_law(implementation: Implementation) -> None:
    out = implementation.verify_chain(
        torch.zeros(2, 4),
        torch.tensor([3]),
        torch.tensor([0, 1]),
        draft_logits=torch.tensor([[3.0, 2.0, 1.0, 0.0]]),
        draft_top_k=2,
        accept_uniforms=torch.tensor([0.5]),
        recovered_uniforms=torch.tensor([0.9]),
    )
    assert out.status.tolist() == [Status.UNUSABLE_DRAFT_LAW]
    assert out.token_ids.tolist() == [[2, -1]]


# --- rows that are no law, greedy requests ----------------------------------------------------------------


@pytest.mark.parametrize("filters", [{"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.3}], ids=str)
def test_rows_without_a_law_are_as_without_filters(implementation: Implementation, filters: Filter) -> None:
    logits = torch.tensor([[1.0, NAN, 3.0, 0.0], [-INF] * 4, [1.0, INF, 0.0, 0.0], [NAN] * 4])
    drawn = {"seeds": 3, "positions": torch.arange(4)}
    plain, out = implementation.sample(logits, **drawn), implementation.sample(logits, **drawn, **filters)
    assert margins.all_same_bits(plain, out)
    assert out.status.tolist() == [
        Status.NON_FINITE_TARGET,
        Status.MASKED_TARGET,
        Status.NON_FINITE_TARGET,
        Status.NON_FINITE_TARGET,
    ]


def test_greedy_requests_have_no_filters(implementation: Implementation) -> None:
    arguments = inputs.chain([2, 3, 0], 100, "logits", seed=4, temperature=torch.zeros(3))
    plain = implementation.verify_chain(**arguments, **random_chains.EXTRAS)
    out = implementation.verify_chain(
        **arguments, top_k=2, top_p=0.1, min_p=0.5, draft_top_k=3, **random_chains.EXTRAS
    )
    assert margins.all_same_bits(plain, out)


def test_arguments_are_not_changed(implementation: Implementation) -> None:
    arguments = inputs.chain([2, 1], 50, "logits", seed=4)
    filtering.add_filters(arguments, random.Random(1))
    filtering.add_filters(arguments, random.Random(2), "draft_")
    before = {n: v.clone() for n, v in arguments.items() if isinstance(v, Tensor)}
    implementation.verify_chain(**arguments)
    for name, value in before.items():
        assert margins.same_bits(value, arguments[name]), name


# --- errors -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", ["verify_chain", "sample", "sample_recovered"])
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"top_k": torch.ones(2)}, "top_k must be int32 or int64, got float32"),
        (
            {"top_k": torch.ones(3, dtype=torch.int32)},
            r"top_k must be \[batch\] with 2 elements, got shape \[3\]",
        ),
        ({"top_p": torch.ones(2, dtype=torch.float64)}, "top_p must be float32, got float64"),
        ({"top_p": torch.ones(2, 1)}, r"top_p must be \[batch\] with 2 elements, got shape \[2, 1\]"),
        ({"min_p": torch.ones(2, dtype=torch.int64)}, "min_p must be float32, got int64"),
        ({"min_p": torch.ones(1)}, r"min_p must be \[batch\] with 2 elements, got shape \[1\]"),
        ({"filter_order": "both"}, "filter_order must be 'sequential' or 'joint', got 'both'"),
    ],
)
def test_errors(op: str, given: Filter, message: str, default_native: Implementation) -> None:
    chain = inputs.chain([1, 1], 20, "one_hot")
    if op == "sample":
        chain = {"logits": chain["target_logits"][:2], "seeds": 1, "positions": torch.arange(2)}
    elif op == "sample_recovered":
        chain = of_drafts_alone(chain)
        message = message.replace("batch", "num_drafts")
    with pytest.raises(RuntimeError, match=f"{op}: {message}"):
        getattr(default_native, op)(**chain, **given)


def of_drafts_alone(chain: inputs.Arguments) -> inputs.Arguments:
    """For sample_recovered, of chains of one draft each."""
    left_out = ("cu_num_draft_tokens",)
    return {n: v for n, v in chain.items() if n not in left_out} | {
        "target_logits": chain["target_logits"][::2]
    }


@pytest.mark.parametrize("op", ["verify_chain", "sample_recovered"])
@pytest.mark.parametrize(
    ("law", "given", "message"),
    [
        ("logits", {"draft_top_k": torch.ones(2)}, "draft_top_k must be int32 or int64, got float32"),
        (
            "logits",
            {"draft_top_p": torch.ones(3)},
            r"draft_top_p must be \[batch\] with 2 elements, got shape \[3\]",
        ),
        ("logits", {"draft_min_p": torch.ones(2).double()}, "draft_min_p must be float32, got float64"),
        ("probs", {"draft_top_k": 3}, "draft_top_k must be given with draft_logits, got it without"),
        ("one_hot", {"draft_top_p": 0.3}, "draft_top_p must be given with draft_logits, got it without"),
        ("support", {"draft_min_p": 0.3}, "draft_min_p must be given with draft_logits, got it without"),
        (
            "logits_and_logsumexp",
            {"draft_top_p": 0.5},
            "draft_logsumexp of filtered rows must be given with draft_thresholds, got draft_top_p",
        ),
        (
            "logits",
            {"draft_thresholds": torch.zeros(2), "draft_top_k": 3},
            "draft_thresholds and draft_top_k must be at most one, got both",
        ),
        ("probs", {"draft_thresholds": torch.zeros(2)}, "draft_thresholds must be given with draft_logits"),
        (
            "logits",
            {"draft_thresholds": torch.zeros(2).double()},
            "draft_thresholds must be float32, got float64",
        ),
        (
            "logits",
            {"draft_thresholds": torch.zeros(3)},
            r"draft_thresholds must be \[num_drafts\] with 2 elements, got shape \[3\]",
        ),
        (
            "logits",
            {"draft_thresholds": torch.zeros(2, 0)},
            r"draft_thresholds must be \[max_requests, k\] with max_requests = 2 and k at least",
        ),
    ],
)
def test_errors_of_draft_filters(
    op: str, law: str, given: Filter, message: str, default_native: Implementation
) -> None:
    chain = inputs.chain([1, 1], 20, law)
    if op == "sample_recovered":
        chain = of_drafts_alone(chain)
        message = message.replace("batch", "num_drafts")
        if "max_requests" in message:  # It takes no laws by request and slot.
            message = r"draft_thresholds must be \[num_drafts\] with 2 elements, got shape \[2, 0\]"
    with pytest.raises(RuntimeError, match=f"{op}: {message}"):
        getattr(default_native, op)(**chain, **given)
