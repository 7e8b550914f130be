"""plan_verification: the drafts that are likeliest to be accepted, under a budget or by cost."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import pytest
import specdec_ops
import torch
from hypothesis import given
from hypothesis import strategies as st
from implementations import REFERENCE, Implementation
from torch import Tensor

NAN, INF = float("nan"), float("inf")


def plan(
    implementation: Implementation, probs: Sequence[Sequence[float]], **limits: Any
) -> tuple[list[int], list[float]]:
    """Of requests with these estimates: counts, and what is expected."""
    flat = torch.tensor([p for of_request in probs for p in of_request], dtype=torch.float64)
    out = implementation.plan_verification(flat, totals([len(p) for p in probs]), **limits)
    assert out.num_draft_tokens.dtype == torch.int32
    assert out.expected_tokens.dtype == torch.float64
    return out.num_draft_tokens.tolist(), out.expected_tokens.tolist()


def totals(counts: Sequence[int]) -> Tensor:
    return torch.tensor([0, *counts]).cumsum(0)


class TestBudget:
    def test_the_largest_products_are_admitted(self, implementation: Implementation) -> None:
        """Survivals .9 .45 .36, .6 .54 .054 and .5: the best four are .9, .6, .54, .5."""
        probs = [[0.9, 0.5, 0.8], [0.6, 0.9, 0.1], [0.5]]
        counts, expected = plan(implementation, probs, budget=4)
        assert counts == [1, 2, 1]
        assert expected == pytest.approx([1.9, 2.14, 1.5], abs=1e-9)

    def test_a_likely_draft_behind_an_unlikely_one_does_not_jump_ahead(
        self, implementation: Implementation
    ) -> None:
        assert plan(implementation, [[0.1, 1.0, 1.0], [0.2]], budget=1)[0] == [0, 1]

    @pytest.mark.parametrize(("budget", "counts"), [(0, [0, 0, 0]), (1, [1, 0, 0]), (2, [1, 0, 1])])
    def test_of_equal_survivals_the_lower_request_comes_first(
        self, implementation: Implementation, budget: int, counts: list[int]
    ) -> None:
        assert plan(implementation, [[0.5], [0.25], [0.5]], budget=budget)[0] == counts

    def test_of_equal_survivals_the_earlier_slot_comes_first(self, implementation: Implementation) -> None:
        assert plan(implementation, [[0.5, 1.0], [0.5, 1.0]], budget=3)[0] == [2, 1]

    def test_a_budget_for_all_takes_all(self, implementation: Implementation) -> None:
        assert plan(implementation, [[0.9, 0.9], [], [0.1]], budget=99) == (
            [2, 0, 1],
            pytest.approx([2.71, 1.0, 1.1], abs=1e-9),
        )

    @pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
    def test_a_budget_in_a_tensor(self, implementation: Implementation, dtype: torch.dtype) -> None:
        probs = [[0.9, 0.5], [0.6]]
        assert plan(implementation, probs, budget=torch.tensor(2, dtype=dtype))[0] == [1, 1]

    @pytest.mark.parametrize(
        ("estimate", "counts"), [(NAN, [0, 1]), (-0.5, [0, 1]), (0.0, [0, 1]), (7.0, [2, 1]), (INF, [2, 1])]
    )
    def test_estimates_that_are_no_probabilities(
        self, implementation: Implementation, estimate: float, counts: list[int]
    ) -> None:
        got, expected = plan(implementation, [[estimate, 1.0], [0.5]], budget=3)
        assert got == counts
        assert expected == [1.0 + counts[0], 1.5]

    def test_survivals_of_a_certain_and_of_the_smallest_size(self, implementation: Implementation) -> None:
        """2^-32 is the least that counts."""
        assert plan(implementation, [[2.0**-32], [2.0**-33], [1.0]], budget=9) == (
            [1, 0, 1],
            [1 + 2.0**-32, 1.0, 2.0],
        )

    def test_no_requests_and_no_drafts(self, implementation: Implementation) -> None:
        assert plan(implementation, [], budget=3) == ([], [])
        assert plan(implementation, [[], []], budget=3) == ([0, 0], [1.0, 1.0])


class TestCosts:
    def test_admission_ends_before_the_first_drop(self, implementation: Implementation) -> None:
        """Two requests, survivals .9, .8, .1; a row costs 1 up to 4 rows: 2, 2.9/3..."""
        probs = [[0.9], [0.8, 0.125]]
        flat = [0.0, 1, 1, 1, 1, 1]
        assert plan(implementation, probs, step_costs=torch.tensor(flat))[0] == [1, 2]
        # 2/1, 2.9/1.4, 3.7/1.8, 3.8/2.2: rises, falls by little, falls.
        rising = torch.tensor([0.0, 1.0, 1.0, 1.4, 1.8, 2.2])
        assert plan(implementation, probs, step_costs=rising)[0] == [1, 0]

    def test_it_does_not_look_past_a_drop(self, implementation: Implementation) -> None:
        """2/1, 2.5/2 is a drop; behind it 3.0/1.1 would be worth more."""
        probs = [[0.5], [0.5]]
        assert plan(implementation, probs, step_costs=torch.tensor([0, 1, 1, 2, 1.1]))[0] == [0, 0]

    def test_no_drop_where_the_quotient_stays(self, implementation: Implementation) -> None:
        """1/1, 1.5/1.5, 1.75/1.75."""
        costs = torch.tensor([0, 1, 1.5, 1.75])
        assert plan(implementation, [[0.5, 0.5]], step_costs=costs)[0] == [2]

    def test_the_table_bounds_the_rows(self, implementation: Implementation) -> None:
        assert plan(implementation, [[0.9, 0.9], [0.8]], step_costs=torch.ones(4))[0] == [1, 0]

    def test_both_limits_hold(self, implementation: Implementation) -> None:
        probs = [[0.9, 0.9], [0.8]]
        assert plan(implementation, probs, step_costs=torch.ones(9), budget=2)[0] == [2, 0]
        assert plan(implementation, probs, step_costs=torch.ones(4), budget=torch.tensor(2))[0] == [1, 0]

    def test_survivals_of_0_are_not_admitted_at_no_cost(self, implementation: Implementation) -> None:
        assert plan(implementation, [[0.0, 1.0], [0.5]], step_costs=torch.ones(9))[0] == [0, 1]


#: Of a draft token and its request, with what was drafted before.
Estimate = Callable[[int, tuple[int, ...]], float]


class TestLaws:
    """Exact laws of two requests that share a budget, by enumeration in rationals."""

    P = tuple(Fraction(n, 4) for n in (2, 1, 1))
    Q = tuple(Fraction(n, 10) for n in (2, 5, 3))
    K = 2

    def emitted(self, drafts: tuple[int, ...], verified: int) -> dict[tuple[int, ...], Fraction]:
        """The law of the next K + 1 tokens where the first drafts are verified."""
        law: Counter[tuple[int, ...]] = Counter()
        still = Fraction(1)
        rest = [max(p - q, Fraction(0)) for p, q in zip(self.P, self.Q, strict=True)]
        for slot in range(verified):
            x = drafts[slot]
            accepted = min(Fraction(1), self.P[x] / self.Q[x])
            for y, weight in enumerate(rest):
                if weight:
                    prefix = (*drafts[:slot], y)
                    self.continue_with(law, prefix, still * (1 - accepted) * weight / sum(rest))
            still *= accepted
        self.continue_with(law, drafts[:verified], still)
        return law

    def continue_with(self, law: Counter[tuple[int, ...]], prefix: tuple[int, ...], weight: Fraction) -> None:
        for tail in itertools.product(range(3), repeat=self.K + 1 - len(prefix)):
            chance = weight
            for token in tail:
                chance *= self.P[token]
            law[(*prefix, *tail)] += chance

    def joint_law(self, native: Implementation, estimate: Estimate, budget: int) -> Counter[Any]:
        law: Counter[Any] = Counter()
        for drafts in itertools.product(itertools.product(range(3), repeat=self.K), repeat=2):
            chance = Fraction(1)
            for token in itertools.chain(*drafts):
                chance *= self.Q[token]
            probs = [[estimate(own[slot], own[:slot]) for slot in range(self.K)] for own in drafts]
            counts, _ = plan(native, probs, budget=budget)
            laws = [self.emitted(own, count) for own, count in zip(drafts, counts, strict=True)]
            for (a, p), (b, q) in itertools.product(laws[0].items(), laws[1].items()):
                law[a, b] += chance * p * q
        return law

    def wanted(self) -> Counter[Any]:
        law: Counter[Any] = Counter()
        for tokens in itertools.product(range(3), repeat=2 * (self.K + 1)):
            chance = Fraction(1)
            for token in tokens:
                chance *= self.P[token]
            law[tokens[: self.K + 1], tokens[self.K + 1 :]] = chance
        return law

    @pytest.mark.parametrize("budget", [1, 2, 3])
    def test_estimates_of_earlier_drafts_leave_the_law(
        self, default_native: Implementation, budget: int
    ) -> None:
        by_context = {(): 0.7, (0,): 0.9, (1,): 0.3, (2,): 0.65}
        got = self.joint_law(default_native, lambda _, before: by_context[before], budget)
        assert got == self.wanted()

    def test_the_law_of_docs_numerics_where_an_estimate_looks_at_the_draft(
        self, default_native: Implementation
    ) -> None:
        """Drafts of id 2 are never verified: 3/5, 13/40 and 3/40 in place of 1/2, 1/4 and 1/4."""
        first: Counter[int] = Counter()
        for x in range(3):
            (count,), _ = plan(default_native, [[0.0 if x == 2 else 1.0]], budget=1)
            for tokens, chance in self.emitted((x,), count).items():
                first[tokens[0]] += self.Q[x] * chance
        assert first == {0: Fraction(3, 5), 1: Fraction(13, 40), 2: Fraction(3, 40)}

    def test_estimates_that_look_at_the_draft_do_not(self, default_native: Implementation) -> None:
        """The negative control: slots that hold the last id count as unlikely."""
        got = self.joint_law(default_native, lambda x, _: 0.1 if x == 2 else 0.7, 2)
        assert got != self.wanted()
        first: Counter[int] = Counter()
        for (a, _), chance in got.items():
            first[a[0]] += chance
        assert first[0] > self.P[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
def test_strides_and_dtypes(
    implementation: Implementation, dtype: torch.dtype, id_dtype: torch.dtype
) -> None:
    probs = torch.tensor([0.75, 0.5, 0.625, 0.875], dtype=dtype)
    cu = torch.tensor([0, 2, 4], dtype=id_dtype)
    costs = torch.tensor([0, 1, 1, 1.1, 1.2, 1.3, 9], dtype=dtype)
    want = implementation.plan_verification(probs, cu, budget=3, step_costs=costs)
    assert want.num_draft_tokens.tolist() == [1, 2]
    wide = [torch.stack([t, t.flip(0)], dim=1).flatten()[::2] for t in (probs, cu, costs)]
    got = implementation.plan_verification(wide[0], wide[1], budget=3, step_costs=wide[2])
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


estimates = st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0, NAN, -1.0, 3.0]) | st.floats(0, 1)


@given(
    probs=st.lists(st.lists(estimates, max_size=6), max_size=9),
    budget=st.none() | st.integers(0, 40),
    costs=st.none() | st.lists(st.floats(0.5, 4.0), max_size=30),
)
def test_matches_reference(
    native: Implementation, probs: list[list[float]], budget: int | None, costs: list[float] | None
) -> None:
    check_against_reference(native, probs, budget, costs)


def check_against_reference(
    implementation: Implementation, probs: list[list[float]], budget: int | None, costs: list[float] | None
) -> None:
    limits: dict[str, Any] = {"budget": 5 if budget is None and costs is None else budget}
    if costs is not None:
        limits["step_costs"] = torch.tensor([1.0] * (len(probs) + 1) + costs, dtype=torch.float64)
    got = plan(implementation, probs, **limits)
    assert got == plan(REFERENCE, probs, **limits)
    counts = got[0]
    assert all(0 <= count <= len(own) for count, own in zip(counts, probs, strict=True))
    assert limits["budget"] is None or sum(counts) <= limits["budget"]


def test_more_drafts_than_threads(implementation: Implementation) -> None:
    """Ties among them, and rows that cost more in steps."""
    draw = torch.Generator().manual_seed(1)
    for batch, k in ((150, 3), (40, 12)):
        probs = (torch.rand(batch, k, generator=draw) * 8).round().div(8).tolist()
        costs = torch.arange(500).div(64, rounding_mode="floor").mul(0.01).add(1.0).tolist()
        for budget in (None, 37, 250):
            check_against_reference(implementation, probs, budget, costs)


def test_a_plan_goes_to_verify_chain(implementation: Implementation) -> None:
    """The drafts that are left make a chain of the batch."""
    out = implementation.plan_verification(
        torch.tensor([0.9, 0.5, 0.6, 0.9]), torch.tensor([0, 2, 4]), budget=3
    )
    cu = torch.nn.functional.pad(out.num_draft_tokens.cumsum(0), (1, 0))
    logits = torch.zeros(5, 8)
    verified = specdec_ops.verify_chain(logits, torch.tensor([0, 0, 0]), cu, temperature=0.0)
    assert verified.num_accepted.tolist() == [1, 2]


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no limit": ({"budget": None}, "budget or step_costs must be given, got neither"),
    "negative": ({"budget": -1}, "budget must be at least 0, got -1"),
    "negative tensor": ({"budget": torch.tensor(-2)}, "budget must be at least 0, got -2"),
    "several budgets": ({"budget": torch.tensor([1])}, r"budget must be one number, got shape \[1\]"),
    "real budget": ({"budget": torch.tensor(1.0)}, "budget must be int32 or int64, got float32"),
    "dtype": (
        {"accept_probs": torch.zeros(3, dtype=torch.float16)},
        "accept_probs must be float32 or float64, got float16",
    ),
    "shape": (
        {"accept_probs": torch.zeros(3, 1)},
        r"accept_probs must be \[num_drafts\], got shape \[3, 1\]",
    ),
    "real totals": (
        {"cu_num_draft_tokens": torch.zeros(3)},
        "cu_num_draft_tokens must be int32 or int64, got float32",
    ),
    "no totals": (
        {"cu_num_draft_tokens": torch.zeros(0, dtype=torch.int64)},
        r"cu_num_draft_tokens must be \[batch \+ 1\], got shape \[0\]",
    ),
    "totals": (
        {"cu_num_draft_tokens": torch.tensor([0, 2, 1])},
        "cu_num_draft_tokens must not decrease, got 2 before 1 at index 2",
    ),
    "totals past the end": (
        {"cu_num_draft_tokens": torch.tensor([0, 2, 4])},
        "cu_num_draft_tokens must end with at most num_drafts = 3, got 4",
    ),
    "short table": (
        {"step_costs": torch.ones(2)},
        r"step_costs must be \[max_rows \+ 1\] with at least batch \+ 1 = 3 elements, got shape \[2\]",
    ),
    "free rows": (
        {"step_costs": torch.tensor([0.0, 1, 0, 1])},
        "step_costs must be positive and finite, got 0 for 2 rows",
    ),
    "infinite cost": (
        {"step_costs": torch.tensor([0.0, INF, 1, 1])},
        "step_costs must be positive and finite, got inf for 1 row",
    ),
    "no cost": (
        {"step_costs": torch.tensor([NAN, 1, 1, 1])},
        "step_costs must be positive and finite, got nan for 0 rows",
    ),
    "integer costs": (
        {"step_costs": torch.ones(4, dtype=torch.int64)},
        "step_costs must be float32 or float64, got int64",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments_are_named(default_native: Implementation, case: str) -> None:
    arguments = {
        "accept_probs": torch.full((3,), 0.5),
        "cu_num_draft_tokens": torch.tensor([0, 2, 3]),
        "budget": 2,
        **BAD[case][0],
    }
    with pytest.raises(RuntimeError, match=f"^plan_verification: {BAD[case][1]}"):
        default_native.plan_verification(**arguments)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_graph_reads_its_budget_anew() -> None:
    probs, cu = torch.tensor([0.9, 0.5, 0.6], device="cuda"), torch.tensor([0, 2, 3], device="cuda")
    budget = torch.tensor(0, device="cuda")
    specdec_ops.plan_verification(probs, cu, budget=budget)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = specdec_ops.plan_verification(probs, cu, budget=budget)
    for most, counts in ((1, [1, 0]), (3, [2, 1]), (-4, [0, 0])):
        budget.fill_(most)
        graph.replay()
        assert out.num_draft_tokens.tolist() == counts


def test_opcheck() -> None:
    op = specdec_ops.plan_verification.__globals__["_op"]
    torch.library.opcheck(op, (torch.rand(4), torch.tensor([0, 1, 4])), {"budget": 2})
