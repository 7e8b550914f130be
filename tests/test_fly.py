"""FLy in verify_chain: rejected drafts that are accepted all the same (arXiv 2511.22972)."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import implementations
import inputs
import margins
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from implementations import Implementation
from specdec_ops import Status
from specdec_ops.ops import verify_chain
from test_laws import Law, Model, Sequence, random_model, residual
from test_properties import assert_well_formed, chains

EXTRAS = {"return_logsumexp": True, "return_logprobs": True, "return_accept_probs": True}
NAN, INF = math.nan, math.inf
#: Half a step to either side of a threshold of acceptance, far more than rounding.
STEP = 1e-5


def entropy_of(p: list[float] | Law, top_k: int) -> float:
    largest = sorted((float(v) for v in p), reverse=True)[:top_k]
    return -sum(v * math.log(v) for v in largest if v > 0)


def deferred(native: list[bool], may_defer: list[bool], window: int) -> list[bool]:
    """The verdicts after a pass over those of the plain rule, as vLLM words it."""
    return [
        accepted or (may_defer[i] and i + window < len(native) and all(native[i + 1 : i + 1 + window]))
        for i, accepted in enumerate(native)
    ]


class Chain:
    """Every path of ``k`` drafts of a draft model, each draft with a coin below or above its threshold."""

    def __init__(self, target: Model, draft: Model, vocab_size: int, k: int, draft_law: str) -> None:
        self.target, self.vocab_size, self.k = target, vocab_size, k
        one_hot = draft_law == "one_hot"
        self.paths: list[Sequence] = []
        self.verdicts: list[tuple[bool, ...]] = []
        #: How probable path and coins are.
        self.weights: list[Fraction] = []
        coins: list[float] = []
        told: list[Law] = []
        self.last_laws: list[list[Law]] = []
        for path in itertools.product(range(vocab_size), repeat=k):
            thresholds, laws, drawn = [], [], Fraction(1)
            for i, x in enumerate(path):
                p, q = target(path[:i]), draft(path[:i])
                drawn *= q[x]
                law = tuple(Fraction(v == x) for v in range(vocab_size)) if one_hot else q
                laws.append(law)
                thresholds.append(min(Fraction(1), p[x] / law[x]) if law[x] else Fraction(0))
            if drawn == 0:
                continue
            for verdict in itertools.product([True, False], repeat=k):
                weight = drawn
                for accepted, threshold in zip(verdict, thresholds, strict=True):
                    weight *= threshold if accepted else 1 - threshold
                if weight == 0:
                    continue
                self.paths.append(path)
                self.verdicts.append(verdict)
                self.weights.append(weight)
                coins += [
                    float(t) - STEP if accepted else float(t) + STEP
                    for accepted, t in zip(verdict, thresholds, strict=True)
                ]
                told += laws
                last = [residual(target(path[:i]), law) for i, law in enumerate(laws)]
                self.last_laws.append([*last, target(path)])
        rows = [[float(v) for v in target(path[:i])] for path in self.paths for i in range(k + 1)]
        self.arguments: dict[str, Any] = {
            "target_logits": inputs.logits_of(rows),
            "draft_token_ids": torch.tensor([x for path in self.paths for x in path]),
            "cu_num_draft_tokens": torch.arange(len(self.paths) + 1) * k,
            "accept_uniforms": torch.tensor(coins, dtype=torch.float64).clamp(0, 1 - 2.0**-53),
        }
        q_rows = [[float(v) for v in law] for law in told]
        if draft_law.startswith("logits"):
            self.arguments["draft_logits"] = inputs.logits_of(q_rows)
        if draft_law == "logits_and_logsumexp":
            self.arguments["draft_logsumexp"] = torch.zeros(len(told), dtype=torch.float64)
        if draft_law == "probs":
            self.arguments["draft_probs"] = torch.tensor(q_rows)
        if draft_law == "support":
            self.arguments["draft_support_ids"] = torch.arange(vocab_size).expand(len(told), -1)
            self.arguments["draft_support_logprobs"] = inputs.logits_of(q_rows)

    def expected_accepted(self, window: int, threshold: float, top_k: int) -> list[int]:
        result = []
        for path, verdict in zip(self.paths, self.verdicts, strict=True):
            may_defer = [
                self.target(path[:i])[x] > 0 and entropy_of(self.target(path[:i]), top_k) >= threshold
                for i, x in enumerate(path)
            ]
            flags = deferred(list(verdict), may_defer, window)
            result.append(next((i for i, accepted in enumerate(flags) if not accepted), self.k))
        return result


MODELS = {
    "v3-k2": (random_model(21, 3), random_model(22, 3), 3, 2),
    "v3-k3": (random_model(23, 3, zeros=True), random_model(24, 3), 3, 3),
    "v5-k2": (random_model(25, 5, zeros=True), random_model(26, 5), 5, 2),
    "v2-k4": (random_model(27, 2, zeros=True), random_model(28, 2), 2, 4),
}


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("draft_law", inputs.DRAFT_LAWS)
@pytest.mark.parametrize("name", MODELS)
def test_every_chain_and_every_coin(
    implementation: Implementation, name: str, draft_law: str, window: int
) -> None:
    target, draft, vocab_size, k = MODELS[name]
    chain = Chain(target, draft, vocab_size, k, draft_law)
    uniforms = torch.full((len(chain.paths),), 0.5)
    plain = implementation.verify_chain(**chain.arguments, recovered_uniforms=uniforms)
    accepted_plainly = [next((i for i, a in enumerate(v) if not a), k) for v in chain.verdicts]
    assert plain.num_accepted.tolist() == accepted_plainly
    changed = 0
    for threshold, top_k in itertools.product((0.0, 0.6, 0.9), (1, 3)):
        out = implementation.verify_chain(
            **chain.arguments,
            recovered_uniforms=uniforms,
            fly_window_size=window,
            fly_entropy_threshold=threshold,
            fly_entropy_top_k=top_k,
        )
        expected = chain.expected_accepted(window, threshold, top_k)
        assert out.num_accepted.tolist() == expected
        changed += expected != accepted_plainly
        for path, tokens, n in zip(chain.paths, out.token_ids.tolist(), expected, strict=True):
            assert tokens[:n] == list(path[:n]) and set(tokens[n + 1 :]) <= {-1}
    assert (changed > 0) == (window < k)


@pytest.mark.parametrize("draft_law", inputs.DRAFT_LAWS)
@pytest.mark.parametrize("name", ["v3-k2", "v2-k4"])
def test_emitted_law_is_the_exact_one(native: Implementation, name: str, draft_law: str) -> None:
    """The law of what is emitted, put together from verdicts and a grid of last tokens, over rationals."""
    target, draft, vocab_size, k = MODELS[name]
    chain = Chain(target, draft, vocab_size, k, draft_law)
    cells, window, threshold, top_k = 512, 1, 0.6, 3
    measured: dict[Sequence, float] = defaultdict(float)
    for cell in range(cells):
        out = native.verify_chain(
            **chain.arguments,
            recovered_uniforms=torch.full((len(chain.paths),), (cell + 0.5) / cells, dtype=torch.float64),
            fly_window_size=window,
            fly_entropy_threshold=threshold,
            fly_entropy_top_k=top_k,
        )
        ends = zip(chain.weights, out.token_ids.tolist(), out.num_accepted.tolist(), strict=True)
        for weight, tokens, n in ends:
            measured[tuple(tokens[: n + 1])] += float(weight) / cells
    exact: dict[Sequence, Fraction] = defaultdict(Fraction)
    accepted = chain.expected_accepted(window, threshold, top_k)
    for path, weight, laws, n in zip(chain.paths, chain.weights, chain.last_laws, accepted, strict=True):
        for y, share in enumerate(laws[n]):
            exact[(*path[:n], y)] += weight * share
    assert sum(exact.values()) == 1
    for sequence in measured.keys() | exact.keys():
        assert measured[sequence] == pytest.approx(float(exact[sequence]), abs=1 / cells), sequence


@pytest.mark.parametrize("temperature", [0.0, -1.0, NAN])
@pytest.mark.parametrize("window", [1, 2, 3])
def test_every_greedy_chain(implementation: Implementation, window: int, temperature: float) -> None:
    """The argmax in place of the coin; the entropy at temperature 1."""
    vocab_size, k, threshold = 3, 3, 0.7
    rows = torch.tensor([[0.0, 1.0, 0.5], [2.0, 2.0, -INF], [0.3, -0.2, 0.0], [0.0, 0.0, 9.0]])
    paths = list(itertools.product(range(vocab_size), repeat=k))
    out = implementation.verify_chain(
        rows.repeat(len(paths), 1),
        torch.tensor(paths).flatten(),
        torch.arange(len(paths) + 1) * k,
        temperature=temperature,
        fly_window_size=window,
        fly_entropy_threshold=threshold,
    )
    argmax = rows.argmax(-1).tolist()
    entropies = [entropy_of(row.double().softmax(-1).tolist(), 3) for row in rows]
    assert [e >= threshold for e in entropies] == [True, False, True, False]
    deferrals = 0
    for path, tokens, n in zip(paths, out.token_ids.tolist(), out.num_accepted.tolist(), strict=True):
        native = [x == best for x, best in zip(path, argmax[:k], strict=True)]
        flags = deferred(native, [e >= threshold for e in entropies[:k]], window)
        expected = next((i for i, accepted in enumerate(flags) if not accepted), k)
        assert n == expected
        assert tokens == [*path[:n], argmax[n], *[-1] * (k - n)]
        deferrals += flags != native
    assert (deferrals > 0) == (window < k)


def single(draft: int, **changes: Any) -> dict[str, Any]:
    """One request of two drafts, the first one rejected by its coin or argmax, the second one accepted."""
    rows = inputs.logits_of([[0.4, 0.3, 0.3, 0.0], [0.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 0.0]])
    return {
        "target_logits": rows,
        "draft_token_ids": torch.tensor([draft, 1]),
        "cu_num_draft_tokens": torch.tensor([0, 2]),
        "accept_uniforms": torch.tensor([0.9, 0.9]),
        "recovered_uniforms": torch.tensor([0.99]),
        "fly_window_size": 1,
        **changes,
    }


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_masked_and_invalid_drafts_are_never_deferred(
    implementation: Implementation, temperature: float
) -> None:
    for draft, accepted in [(2, 2), (1, 2), (3, 0), (-1, 0), (4, 0), (-7, 0)]:
        out = implementation.verify_chain(**single(draft, temperature=temperature))
        assert out.num_accepted.tolist() == [accepted], draft
        assert out.token_ids[0, 0] == draft if accepted else 0 <= out.token_ids[0, 0] < 3
        wrong = draft in (4, -7)
        assert out.status.tolist() == [Status.INVALID_DRAFT_ID if wrong else Status.OK]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_entropy_is_compared_with_the_threshold(
    implementation: Implementation, temperature: float
) -> None:
    """Over the largest probabilities alone, which are not normalised again."""
    for top_k, entropy in [
        (1, -0.4 * math.log(0.4)),
        (2, -0.4 * math.log(0.4) - 0.3 * math.log(0.3)),
        (3, -0.4 * math.log(0.4) - 0.6 * math.log(0.3)),
        (64, -0.4 * math.log(0.4) - 0.6 * math.log(0.3)),
    ]:
        for shift, accepted in [(-1e-6, 2), (1e-6, 0)]:
            out = implementation.verify_chain(
                **single(
                    2,
                    temperature=temperature,
                    fly_entropy_top_k=top_k,
                    fly_entropy_threshold=entropy + shift,
                )
            )
            assert out.num_accepted.tolist() == [accepted]


def test_a_threshold_of_zero_defers_without_doubt(implementation: Implementation) -> None:
    """Even where one id has all the probability, up to rounding."""
    for offset in (0.0, 0.1, 3.3, -17.7):
        rows = torch.tensor([[80.0, 0.0], [80.0, 0.0], [80.0, 0.0]]) + offset
        out = implementation.verify_chain(
            rows,
            torch.tensor([1, 0]),
            torch.tensor([0, 2]),
            temperature=0.0,
            fly_window_size=1,
            fly_entropy_threshold=0.0,
        )
        assert out.token_ids.tolist() == [[1, 0, 0]]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("top_k", [1, 2, 3, 7, 64])
@pytest.mark.parametrize(
    "places", [(5, 6, 7, 8), (5, 4100, 8200, 9000), (4095, 4096, 8191, 8192), (0, 1, 4096, 9998)], ids=str
)
def test_the_largest_probabilities_are_found_in_any_block(
    native: Implementation, places: tuple[int, ...], top_k: int, temperature: float
) -> None:
    """Blocks of 4,096 ids; ties, and a background that counts with a large ``fly_entropy_top_k``."""
    generator = inputs.generator(3)
    row = torch.randn(10_000, generator=generator) * 0.1
    row[list(places)] = torch.tensor([9.0, 9.0, 8.5, 8.0])
    rows = torch.full((3, 10_000), -INF)
    rows[0], rows[1, 1], rows[2, 2] = row, 0.0, 0.0
    entropy = entropy_of(row.double().softmax(-1).tolist(), top_k)
    for shift, accepted in [(-2e-6, 2), (2e-6, 0)]:
        out = native.verify_chain(
            rows,
            torch.tensor([77, 1]),
            torch.tensor([0, 2]),
            temperature=temperature,
            accept_uniforms=torch.full((2,), 0.9),
            recovered_uniforms=torch.full((1,), 0.5),
            fly_window_size=1,
            fly_entropy_top_k=top_k,
            fly_entropy_threshold=entropy + shift,
        )
        assert out.num_accepted.tolist() == [accepted]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "spoil", [lambda row: row.fill_(NAN), lambda row: row.fill_(-INF), lambda row: row.fill_(INF)]
)
def test_a_row_without_a_law_in_the_window_accepts_nothing(
    implementation: Implementation, spoil: Callable[[Any], Any], temperature: float
) -> None:
    arguments = single(2, temperature=temperature)
    spoil(arguments["target_logits"][1])
    out = implementation.verify_chain(**arguments, **EXTRAS)
    assert (out.num_accepted.tolist(), out.status.tolist()) == ([0], [Status.OK])
    assert 0 <= out.token_ids[0, 0] < 3 and out.token_ids[0, 1:].tolist() == [-1, -1]
    assert out.logsumexp.isnan().tolist() == [False, True, True]
    assert out.accept_probs.isnan().tolist() == [False, True]


@pytest.mark.parametrize("bad_id", [-1, -2, 4])
def test_an_invalid_id_in_the_window_is_not_accepted(implementation: Implementation, bad_id: int) -> None:
    arguments = single(2)
    arguments["draft_token_ids"][1] = bad_id
    out = implementation.verify_chain(**arguments)
    assert (out.num_accepted.tolist(), out.status.tolist()) == ([0], [Status.OK])


@pytest.mark.parametrize("value", [NAN, INF, 0.0, -0.5])
def test_an_unusable_draft_law_counts_as_one_hot(implementation: Implementation, value: float) -> None:
    """Deferred like any other draft; its status shows only where it ends the request."""
    for threshold, accepted, status in [(0.3, 2, Status.OK), (9.0, 0, Status.UNUSABLE_DRAFT_LAW)]:
        out = implementation.verify_chain(
            **single(2, fly_entropy_threshold=threshold, draft_probs=torch.full((2, 4), value)), **EXTRAS
        )
        assert (out.num_accepted.tolist(), out.status.tolist()) == ([accepted], [status])
        assert out.accept_probs[0].isnan()


def chains_of_all_kinds(draft_law: str, vocab_size: int, *, uniforms: bool) -> inputs.Arguments:
    """Greedy and sampled requests whose drafts are often rejected and often followed by accepted ones."""
    batch = 40
    arguments = inputs.chain(
        [r % 6 for r in range(batch)],
        vocab_size,
        draft_law,
        seed=8,
        scale=2.0,
        noise=0.8,
        temperature=torch.tensor([0.0, 0.6, 1.0, 1.4] * 10),
        draft_temperature=torch.ones(batch),
        uniforms=uniforms,
    )
    best = arguments["target_logits"].argmax(-1)
    cu = arguments["cu_num_draft_tokens"].tolist()
    for r in range(0, batch, 4):
        # Greedy drafts that are right but for each third.
        for i in range(cu[r + 1] - cu[r]):
            arguments["draft_token_ids"][cu[r] + i] = (best[cu[r] + r + i] + (i % 3 == 0)) % vocab_size
    return arguments


@pytest.mark.parametrize("uniforms", [False, True], ids=["seeds", "uniforms"])
@pytest.mark.parametrize("vocab_size", [40, 9000])
@pytest.mark.parametrize("draft_law", inputs.DRAFT_LAWS)
def test_a_look_ahead_in_vain_leaves_no_trace(
    native: Implementation, draft_law: str, vocab_size: int, uniforms: bool
) -> None:
    """Where no draft is deferred, each bit of each output is that of a call without FLy."""
    arguments = chains_of_all_kinds(draft_law, vocab_size, uniforms=uniforms)
    fly = {"fly_window_size": 2, "fly_entropy_threshold": 0.0}
    for extras in ({}, EXTRAS):
        plain = native.verify_chain(**arguments, **extras)
        out = native.verify_chain(**arguments, **fly, **extras)
        more = out.num_accepted > plain.num_accepted
        counts = arguments["cu_num_draft_tokens"].diff()
        in_vain = ~more & (plain.num_accepted + 2 < counts)
        assert more.sum() >= 3 and in_vain.sum() >= 3
        assert (out.num_accepted >= plain.num_accepted).all()
        same = inputs.select_requests(arguments, torch.arange(40)[~more].tolist())
        kept = [
            native.verify_chain(**same, **options, **extras, max_num_draft_tokens=5) for options in ({}, fly)
        ]
        assert margins.all_same_bits(*kept)
        assert margins.same_bits(out.token_ids[~more], plain.token_ids[~more])


@pytest.mark.parametrize("draft_law", inputs.DRAFT_LAWS)
def test_bits_are_those_of_any_tier_batch_and_number_of_threads(draft_law: str, num_threads: None) -> None:
    arguments = chains_of_all_kinds(draft_law, 9000, uniforms=False)
    options = {"fly_window_size": 1, "max_num_draft_tokens": 5, **EXTRAS}
    expected = None
    for name in implementations.native_names():
        with implementations.use(name) as native:
            for threads in (1, 4):
                torch.set_num_threads(threads)
                out = native.verify_chain(**arguments, **options)
                expected = expected or out
                assert margins.all_same_bits(out, expected)
    assert expected is not None
    for order in ([7], [39, 5, 18, 29], [20]):
        alone = implementations.loaded_native().verify_chain(
            **inputs.select_requests(arguments, order), **options
        )
        for name in ("token_ids", "num_accepted", "status", "logprobs"):
            assert margins.same_bits(getattr(alone, name), getattr(expected, name)[order])


@given(
    chains(),
    st.integers(1, 4),
    st.sampled_from([0.0, 0.1, 0.3, 0.8, INF]),
    st.sampled_from([1, 2, 3, 10, 64]),
    st.booleans(),
)
def test_matches_reference(
    native: Implementation,
    arguments: inputs.Arguments,
    window: int,
    threshold: float,
    top_k: int,
    gives_bonus: bool,
) -> None:
    if gives_bonus:
        batch = arguments["cu_num_draft_tokens"].shape[0] - 1
        arguments = inputs.without_bonus_rows(arguments, torch.zeros(batch, dtype=torch.int64))
    arguments |= {
        "fly_window_size": window,
        "fly_entropy_threshold": threshold,
        "fly_entropy_top_k": top_k,
    }
    out = native.verify_chain(**arguments, **EXTRAS)
    assert_well_formed(out, arguments)
    margins.assert_chain_matches(out, arguments, max_near=1)
    lean = native.verify_chain(**arguments)
    assert margins.all_same_bits(lean[:3], out[:3])


@pytest.mark.parametrize("draft_law", inputs.DRAFT_LAWS)
def test_matches_reference_over_many_requests(native: Implementation, draft_law: str) -> None:
    arguments = chains_of_all_kinds(draft_law, 500, uniforms=False)
    arguments |= {"fly_window_size": 1, "fly_entropy_threshold": 0.5}
    margins.assert_chain_matches(native.verify_chain(**arguments, **EXTRAS), arguments)


def test_opcheck() -> None:
    arguments = inputs.chain([2, 0, 3], 70, "logits")
    names = ("target_logits", "draft_token_ids", "cu_num_draft_tokens", "temperature")
    args = (*(arguments.pop(name) for name in names), 3)
    torch.library.opcheck(verify_chain._op, args, {**arguments, "fly_window_size": 1})
