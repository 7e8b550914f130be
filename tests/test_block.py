"""Block verification in verify_chain (arXiv 2403.10444): exact laws, goldens, and what it has in common."""

from __future__ import annotations

import itertools
from collections import defaultdict
from fractions import Fraction
from typing import Any, NamedTuple

import chi_square
import implementations
import inputs
import margins
import pytest
import random_chains
import specdec_ops
import torch
from implementations import REFERENCE, Implementation
from specdec_ops import Status
from specdec_ops.ops import verify_chain
from test_laws import (
    CASE_A,
    CASE_T,
    MODELS,
    Law,
    Model,
    Sequence,
    context_free,
    exact_emitted_law,
    random_model,
    target_law,
)

EXTRAS = random_chains.EXTRAS
#: To either side of a threshold, far more than rounding and far less than the thresholds' distances.
STEP = 1e-5
ONE = Fraction(1)


class Judged(NamedTuple):
    """What block verification makes of a path of drafts, over rationals."""

    #: By draft: how probable it is that those up to it are accepted.
    chances: list[Fraction]
    #: By draft: what its coin is compared with.
    thresholds: list[Fraction]
    #: By number of accepted drafts: the law of the token that follows.
    last: list[Law]


def judge(target: Model, draft: Model, path: Sequence, *, one_hot: bool) -> Judged:
    k = len(path)
    rows = [target(path[:i]) for i in range(k + 1)]
    told = [
        tuple(Fraction(v == path[i]) for v in range(len(rows[0]))) if one_hot else draft(path[:i])
        for i in range(k)
    ]
    chances = [ONE]
    for i, x in enumerate(path):
        chances.append(min(ONE, chances[-1] * rows[i][x] / told[i][x]))
    thresholds, last = [], []
    for i in range(k + 1):
        chance = chances[i]
        if i == k:
            thresholds.append(chance)
            last.append(rows[k])
            continue
        rest = [max(chance * p - q, Fraction(0)) for p, q in zip(rows[i], told[i], strict=True)]
        z = sum(rest, Fraction(0))
        thresholds.append(z / (z + 1 - chance) if z + 1 - chance > 0 else ONE)
        last.append(tuple(r / z for r in rest) if z > 0 else rows[i])
    return Judged(chances[1:], thresholds[1:], last)


def paths_of(draft: Model, vocab_size: int, k: int) -> dict[Sequence, Fraction]:
    """Every path that the draft model can draw, and how probable it is."""
    paths = {(): ONE}
    for _ in range(k):
        paths = {
            (*path, x): weight * draft(path)[x]
            for path, weight in paths.items()
            for x in range(vocab_size)
            if draft(path)[x] > 0
        }
    return paths


def exact_block_law(
    target: Model, draft: Model, vocab_size: int, k: int, *, one_hot: bool
) -> dict[Sequence, Fraction]:
    """The law of the emitted sequence."""
    emitted: dict[Sequence, Fraction] = defaultdict(Fraction)
    for path, weight in paths_of(draft, vocab_size, k).items():
        judged = judge(target, draft, path, one_hot=one_hot)
        left = weight
        for accepted in range(k, -1, -1):
            ends = left * judged.thresholds[accepted - 1] if accepted else left
            left -= ends
            for y, share in enumerate(judged.last[accepted]):
                emitted[(*path[:accepted], y)] += ends * share
    return {sequence: weight for sequence, weight in emitted.items() if weight > 0}


def mean_accepted(emitted: dict[Sequence, Fraction]) -> Fraction:
    return sum(((len(tokens) - 1) * weight for tokens, weight in emitted.items()), Fraction(0))


def continued(emitted: dict[Sequence, Fraction], target: Model, length: int) -> dict[Sequence, Fraction]:
    """The law of the emitted tokens followed by the target's own, cut to one length."""
    result: dict[Sequence, Fraction] = defaultdict(Fraction)
    for tokens, weight in emitted.items():
        if len(tokens) >= length:
            result[tokens[:length]] += weight
            continue
        following = {(*tokens, y): weight * p for y, p in enumerate(target(tokens)) if p > 0}
        for sequence, share in continued(following, target, length).items():
            result[sequence] += share
    return result


def laws_of(draft_law: str, rows: list[Law]) -> dict[str, Any]:
    told = [[float(v) for v in row] for row in rows]
    if draft_law == "one_hot":
        return {}
    if draft_law == "probs":
        return {"draft_probs": torch.tensor(told)}
    if draft_law == "support":
        ids = torch.arange(len(told[0])).flip(0).expand(len(told), -1)
        return {"draft_support_ids": ids, "draft_support_logprobs": inputs.logits_of(told).flip(1)}
    laws: dict[str, Any] = {"draft_logits": inputs.logits_of(told)}
    if draft_law == "logits_and_logsumexp":
        laws["draft_logsumexp"] = torch.zeros(len(told), dtype=torch.float64)
    return laws


@pytest.mark.parametrize("draft_law", inputs.DRAFT_LAWS)
@pytest.mark.parametrize("name", MODELS)
def test_every_path_and_every_coin(implementation: Implementation, name: str, draft_law: str) -> None:
    """Each coin just below or above its threshold, each edge of the last token's law from both sides."""
    target, draft, vocab_size, k = MODELS[name]
    one_hot = draft_law == "one_hot"
    drafts: list[int] = []
    coins: list[float] = []
    last: list[float] = []
    rows: list[Law] = []
    told: list[Law] = []
    chances: list[float] = []
    expected: list[tuple[Sequence, int, bool]] = []
    for path in paths_of(draft, vocab_size, k):
        judged = judge(target, draft, path, one_hot=one_hot)
        for verdict in itertools.product([True, False], repeat=k):
            if any(h == (0 if below else 1) for below, h in zip(verdict, judged.thresholds, strict=True)):
                continue
            accepted = max((i + 1 for i in range(k) if verdict[i]), default=0)
            edges = list(itertools.accumulate(judged.last[accepted]))
            for v, edge in enumerate(edges[:-1]):
                for is_below in (True, False):
                    if edge == (0 if is_below else 1):
                        continue
                    drafts += path
                    coins += [
                        float(h) + (-STEP if below else STEP)
                        for below, h in zip(verdict, judged.thresholds, strict=True)
                    ]
                    last.append(float(edge) + (-STEP if is_below else STEP))
                    rows += [target(path[:i]) for i in range(k + 1)]
                    told += [draft(path[:i]) for i in range(k)]
                    chances += [float(chance) for chance in judged.chances]
                    # The token is at most v, or above it.
                    expected.append((path[:accepted], v, is_below))
    out = implementation.verify_chain(
        inputs.logits_of([[float(v) for v in row] for row in rows]),
        torch.tensor(drafts),
        torch.arange(len(expected) + 1) * k,
        accept_uniforms=torch.tensor(coins, dtype=torch.float64).clamp(0, 1 - 2.0**-53),
        recovered_uniforms=torch.tensor(last, dtype=torch.float64),
        rule="block",
        return_accept_probs=True,
        **laws_of(draft_law, told),
    )
    assert out.status.tolist() == [Status.OK] * len(expected)
    for tokens, n, (kept, v, is_below) in zip(
        out.token_ids.tolist(), out.num_accepted.tolist(), expected, strict=True
    ):
        assert tokens[:n] == list(kept) and n == len(kept)
        assert (tokens[n] <= v) == is_below and tokens[n + 1 :] == [-1] * (k - n)
    assert out.accept_probs.tolist() == pytest.approx(chances, abs=1e-6)


@pytest.mark.parametrize("one_hot", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_joint_law_is_the_target_s(name: str, one_hot: bool) -> None:
    """Of the rule that the ops are held to above."""
    target, draft, vocab_size, k = MODELS[name]
    emitted = exact_block_law(target, draft, vocab_size, k, one_hot=one_hot)
    exact = {s: w for s, w in target_law(target, vocab_size, k + 1).items() if w > 0}
    assert continued(emitted, target, k + 1) == exact
    token_level = exact_emitted_law(target, draft, vocab_size, k, one_hot=one_hot)
    token_level = {s: w for s, w in token_level.items() if w > 0}
    if one_hot:
        assert emitted == token_level
    assert mean_accepted(emitted) >= mean_accepted(token_level)


@pytest.mark.parametrize("seed", range(20))
def test_never_accepts_less_than_token_level(seed: int) -> None:
    vocab_size, k = 2 + seed % 3, 1 + seed % 4 if seed % 3 == 0 else 2
    target = random_model(2 * seed, vocab_size, zeros=seed % 2 == 1)
    draft = random_model(2 * seed + 1, vocab_size)
    block = exact_block_law(target, draft, vocab_size, k, one_hot=False)
    token_level = exact_emitted_law(target, draft, vocab_size, k, one_hot=False)
    assert mean_accepted(block) >= mean_accepted(token_level)
    if k == 1:
        assert block == {s: w for s, w in token_level.items() if w > 0}


@pytest.mark.parametrize(
    ("case", "k", "expected"),
    [
        (CASE_T, 1, Fraction(2, 3)),
        (CASE_T, 2, Fraction(11, 9)),
        (CASE_T, 3, Fraction(5, 3)),
        (CASE_T, 4, Fraction(166, 81)),
        (CASE_A, 1, Fraction(7, 10)),
        (CASE_A, 2, Fraction(5, 4)),
        (CASE_A, 3, Fraction(273, 160)),
        (CASE_A, 4, Fraction(33413, 16000)),
    ],
    ids=lambda value: str(value) if not isinstance(value, tuple) else f"v{len(value[0])}",
)
def test_mean_accepted_equals_the_goldens(
    implementation: Implementation, case: tuple[Law, Law], k: int, expected: Fraction
) -> None:
    """A21: 11/9 on the paper's toy, where token level has 10/9. The mean is that of the ops' accept_probs."""
    target, draft = context_free(case[0]), context_free(case[1])
    emitted = exact_block_law(target, draft, len(case[0]), k, one_hot=False)
    assert mean_accepted(emitted) == expected
    paths = paths_of(draft, len(case[0]), k)
    n = len(paths)
    out = implementation.verify_chain(
        inputs.logits_of([[float(v) for v in case[0]]]).expand(n * (k + 1), -1),
        torch.tensor(list(paths)).flatten(),
        torch.arange(n + 1) * k,
        draft_probs=torch.tensor([[float(v) for v in case[1]]]).expand(n * k, -1),
        seeds=0,
        positions=torch.arange(n),
        rule="block",
        return_accept_probs=True,
    )
    weights = torch.tensor([float(w) for w in paths.values()]).double()
    mean = (out.accept_probs.view(n, k).double().sum(1) * weights).sum().item()
    assert mean == pytest.approx(float(expected), abs=1e-6)


def test_emitted_law_of_the_paper_s_toy() -> None:
    golden = {(1,): Fraction(1, 3), (1, 1): Fraction(1, 9)}
    for a, b, c in itertools.product(range(2), repeat=3):
        golden[a, b, c] = Fraction((1 + c) * (2 if (a, b) == (0, 1) else 1), 27)
    target, draft = context_free(CASE_T[0]), context_free(CASE_T[1])
    assert exact_block_law(target, draft, 2, 2, one_hot=False) == golden


class Steps:
    """Many runs of two steps on a small model whose laws depend on the last token alone."""

    LENGTH = 6
    vocab_size = 3
    k = 2

    def __init__(self, runs: int) -> None:
        self.runs = runs
        draw = inputs.generator(5)
        self.target = torch.rand(3, 3, generator=draw, dtype=torch.float64) ** 3 + 0.02
        self.draft = torch.rand(3, 3, generator=draw, dtype=torch.float64) ** 3 + 0.02
        self.target /= self.target.sum(1, keepdim=True)
        self.draft /= self.draft.sum(1, keepdim=True)
        self.sequences = torch.full((runs, 2 * (self.k + 1)), -1)
        self.lengths = torch.zeros(runs, dtype=torch.int64)
        self.last = torch.zeros(runs, dtype=torch.int64)

    def step(self, op: Any, draft_seeds: Any, **numbers: Any) -> None:
        """One step of every run; drafts from the package's own sampler."""
        contexts, drafts = [self.last], []
        for slot in range(self.k):
            logits = self.draft[contexts[-1]].log().float()
            drafted = specdec_ops.sample(
                logits, seeds=draft_seeds, positions=self.lengths, draft_slot=slot
            ).token_ids
            drafts.append(drafted)
            contexts.append(drafted)
        rows = torch.stack([self.target[context] for context in contexts], 1)
        told = torch.stack([self.draft[context] for context in contexts[:-1]], 1)
        out = op(
            rows.log().float().flatten(0, 1),
            torch.stack(drafts, 1).flatten(),
            torch.arange(self.runs + 1) * self.k,
            draft_logits=told.log().float().flatten(0, 1),
            rule="block",
            **numbers,
        )
        emitted = out.num_accepted.long() + 1
        for i in range(self.k + 1):
            rows_with = (emitted > i).nonzero().squeeze(1)
            self.sequences[rows_with, self.lengths[rows_with] + i] = out.token_ids[rows_with, i].long()
        self.last = out.token_ids.gather(1, (emitted - 1)[:, None]).squeeze(1).long()
        self.lengths += emitted

    def p_value(self) -> float:
        """Of the joint law of what was emitted and the target's own continuation."""
        draw = inputs.generator(6)
        for i in range(self.LENGTH):
            missing = (self.lengths <= i).nonzero().squeeze(1)
            token = torch.multinomial(self.target[self.last[missing]], 1, generator=draw).squeeze(1)
            self.sequences[missing, i] = self.last[missing] = token
        cells = (self.sequences * 3 ** torch.arange(self.LENGTH)).sum(1)
        observed = torch.bincount(cells, minlength=3**self.LENGTH)
        joint = {(0,): 1.0}
        for _ in range(self.LENGTH):
            joint = {
                (*tokens, y): weight * float(self.target[tokens[-1], y])
                for tokens, weight in joint.items()
                for y in range(3)
            }
        expected = torch.zeros(3**self.LENGTH, dtype=torch.float64)
        for tokens, weight in joint.items():
            expected[sum(t * 3**i for i, t in enumerate(tokens[1:]))] += weight
        return chi_square.p_value(observed.tolist(), expected.tolist())


RUNS = 1 << 18


def test_joint_law_of_two_steps_with_seeds(default_native: Implementation) -> None:
    """Key reuse between steps would show here, and not in one step."""
    steps = Steps(RUNS)
    seeds = torch.arange(RUNS)
    for _ in range(2):
        steps.step(default_native.verify_chain, seeds, seeds=seeds, positions=steps.lengths)
    assert steps.p_value() > 1e-6


@pytest.mark.parametrize("key", ["step and slot", "absolute position"])
def test_coins_by_absolute_position_would_bias_the_next_step(
    default_native: Implementation, key: str
) -> None:
    """The negative control: a look at all coins of a step leaves none of them fresh."""
    steps = Steps(RUNS)
    seeds = torch.arange(RUNS)
    coins = torch.rand(RUNS, 2 * (Steps.k + 1), generator=inputs.generator(7), dtype=torch.float64)
    draws = inputs.generator(8)
    for step in range(2):
        first = steps.lengths if key == "absolute position" else torch.full_like(steps.lengths, 3 * step)
        own = coins.gather(1, first[:, None] + torch.arange(Steps.k))
        steps.step(
            default_native.verify_chain,
            seeds,
            accept_uniforms=own.flatten(),
            recovered_uniforms=torch.rand(RUNS, generator=draws, dtype=torch.float64),
        )
    assert (steps.p_value() > 1e-6) == (key == "step and slot")


@pytest.mark.parametrize("uniforms", [False, True])
@pytest.mark.parametrize("draft_law", inputs.DRAFT_LAWS)
def test_ragged_batches_match_the_reference(native: Implementation, draft_law: str, uniforms: bool) -> None:
    seen: set[int] = set()
    for seed in range(8):
        arguments = inputs.chain(
            [3, 0, 1, 6, 2],
            300,
            draft_law,
            seed=seed,
            uniforms=uniforms,
            dtype=random_chains.DTYPES[seed % 3],
            draft_temperature=0.8 if seed % 2 else None,
        )
        if seed % 2:
            arguments["draft_temperature"] = torch.full((5,), 0.8)
        arguments["temperature"][4] = 0.0
        out = native.verify_chain(**arguments, rule="block", **EXTRAS)
        assert_matches_reference(out, arguments)
        plain = native.verify_chain(**arguments, rule="block")
        assert margins.all_same_bits(plain[:3], out[:3])
        seen |= set(out.num_accepted.tolist())
    assert seen >= {0, 1, 2}


@pytest.mark.parametrize("draft_law", ["logits", "logits_and_logsumexp", "probs"])
def test_after_the_last_attempt_the_law_is_made(native: Implementation, draft_law: str) -> None:
    """Laws so near each other that all 32 attempts fail most of the time."""
    for seed in range(4):
        arguments = random_chains.near_laws(draft_law, seed, noise=0.03)
        assert_matches_reference(native.verify_chain(**arguments, rule="block", **EXTRAS), arguments)


def assert_matches_reference(out: Any, arguments: dict[str, Any]) -> None:
    expected = REFERENCE.verify_chain(**arguments, rule="block", **EXTRAS)
    for name in ("token_ids", "num_accepted", "status"):
        assert torch.equal(getattr(out, name), getattr(expected, name)), name
    for name in ("logsumexp", "logprobs", "accept_probs"):
        torch.testing.assert_close(
            getattr(out, name), getattr(expected, name), equal_nan=True, rtol=1e-4, atol=1e-5, msg=name
        )


def test_awkward_batches_match_the_reference(default_native: Implementation) -> None:
    """Rows without a law, draft laws of no use, ids out of range, padded vocabularies."""
    statuses: set[int] = set()
    for seed in range(120):
        arguments, _, context = random_chains.random_chain(seed, vocab_sizes=(2, 7, 33, 300))
        out = default_native.verify_chain(**arguments, rule="block", **EXTRAS)
        expected = REFERENCE.verify_chain(**arguments, rule="block")
        statuses |= set(out.status.tolist())
        for name in ("token_ids", "num_accepted", "status"):
            assert torch.equal(getattr(out, name), getattr(expected, name)), (name, context)
    assert statuses == set(Status)


@pytest.mark.parametrize("draft_law", inputs.DRAFT_LAWS)
def test_every_tier_and_batch_has_the_same_bits(draft_law: str) -> None:
    arguments = inputs.chain([4, 2, 0, 5], 9001, draft_law, seed=3, dtype=torch.bfloat16, noise=0.3)
    results = []
    for name in implementations.native_cpu_names():
        with implementations.use(name) as tier:
            results.append(tier.verify_chain(**arguments, rule="block", **EXTRAS))
    assert all(margins.all_same_bits(results[0], other) for other in results[1:])
    for r in range(4):
        alone = specdec_ops.verify_chain(**inputs.select_requests(arguments, [r]), rule="block")
        n = int(alone.num_accepted[0]) + 1
        assert alone.token_ids[0, :n].tolist() == results[0].token_ids[r, :n].tolist()


@pytest.mark.parametrize("uniforms", [False, True])
@pytest.mark.parametrize("draft_law", inputs.DRAFT_LAWS)
def test_padding_makes_a_shorter_chain(
    implementation: Implementation, draft_law: str, uniforms: bool
) -> None:
    """The last draft before -1 is judged as the last one of a chain that ends there."""
    for seed in range(12):
        arguments = inputs.chain([5], 40, draft_law, seed=seed, uniforms=uniforms)
        arguments["draft_token_ids"][2] = -1
        padded = implementation.verify_chain(**arguments, rule="block")
        cut = {
            name: value[: {"target_logits": 3, "cu_num_draft_tokens": 2}.get(name, 2)]
            if name in ("target_logits", "draft_token_ids", "accept_uniforms")
            or (name.startswith("draft_") and name != "draft_temperature")
            else value
            for name, value in arguments.items()
        }
        cut["cu_num_draft_tokens"] = torch.tensor([0, 2])
        short = implementation.verify_chain(**cut, rule="block")
        assert padded.num_accepted.tolist() == short.num_accepted.tolist()
        assert padded.token_ids[0, :3].tolist() == short.token_ids[0].tolist()
        assert padded.status.tolist() == [Status.OK]


def test_ids_that_a_sparse_law_lists_twice_are_added(implementation: Implementation) -> None:
    arguments = inputs.chain([3] * 40, 12, "support", seed=4, support=6, noise=1.0)
    once = implementation.verify_chain(**arguments, rule="block", return_accept_probs=True)
    ids, logprobs = arguments["draft_support_ids"], arguments["draft_support_logprobs"]
    halves = logprobs - torch.tensor(2.0).log()
    twice = {**arguments, "draft_support_ids": torch.cat([ids, ids.flip(1)], 1)}
    twice["draft_support_logprobs"] = torch.cat([halves, halves.flip(1)], 1)
    out = implementation.verify_chain(**twice, rule="block", return_accept_probs=True)
    assert torch.equal(once.token_ids, out.token_ids)
    assert torch.allclose(once.accept_probs, out.accept_probs, atol=1e-6)


def test_greedy_requests_are_those_of_token_level(implementation: Implementation) -> None:
    arguments = inputs.chain([3, 2, 4], 30, "logits", seed=2, temperature=torch.zeros(3))
    block = implementation.verify_chain(**arguments, rule="block", **EXTRAS)
    assert margins.all_same_bits(block, implementation.verify_chain(**arguments, **EXTRAS))


@pytest.mark.parametrize("draft_law", ["one_hot", "logits", "support"])
def test_given_bonus_tokens(implementation: Implementation, draft_law: str) -> None:
    arguments = inputs.chain([2, 0, 3], 20, draft_law, seed=1, noise=0.1)
    given = inputs.without_bonus_rows(arguments, torch.tensor([7, 8, 9]))
    plain = implementation.verify_chain(**arguments, rule="block")
    out = implementation.verify_chain(**given, rule="block")
    assert torch.equal(out.num_accepted, plain.num_accepted)
    counts = arguments["cu_num_draft_tokens"].diff()
    for r, n in enumerate(out.num_accepted.tolist()):
        expected = 7 + r if n == counts[r] else plain.token_ids[r, n]
        assert out.token_ids[r, n] == expected


def test_drafts_that_lie_in_entries(implementation: Implementation) -> None:
    calls = inputs.entries("logits", indices=[4, 0, 2], counts=[2, 3, 1], max_requests=6, k=3)
    kept = implementation.verify_chain(**calls.kept, rule="block", **EXTRAS)
    gathered = implementation.verify_chain(**calls.gathered, rule="block", **EXTRAS)
    assert margins.all_same_bits(kept, gathered)


def test_rows_behind_the_last_coin_that_can_win_are_not_read(native: Implementation) -> None:
    """Without a draft law chances only fall: once all coins ahead are above, the rest is not looked at."""
    rows = inputs.logits_of([[0.5, 0.5]] * 5)
    rows[2:] = torch.nan
    out = native.verify_chain(
        rows,
        torch.tensor([0, 0, 0, 0]),
        torch.tensor([0, 4]),
        accept_uniforms=torch.tensor([0.3, 0.6, 0.6, 0.6]),
        recovered_uniforms=torch.tensor([0.5]),
        rule="block",
    )
    assert (out.num_accepted.tolist(), out.status.tolist()) == ([1], [Status.OK])
    assert out.token_ids.tolist() == [[0, 1, -1, -1, -1]]


def test_errors(cpu_implementation: Implementation) -> None:
    arguments = inputs.chain([2], 8, "one_hot")
    if cpu_implementation.is_native:
        with pytest.raises(
            RuntimeError, match=r"verify_chain: rule must be 'token', 'block', .*got 'blocks'"
        ):
            cpu_implementation.verify_chain(**arguments, rule="blocks")
        for name, value in (("accept_rates", torch.ones(2)), ("fly_window_size", 1)):
            with pytest.raises(RuntimeError, match="verify_chain: rule must be 'token' with accept_rates"):
                cpu_implementation.verify_chain(**arguments, rule="block", **{name: value})


def test_opcheck() -> None:
    arguments = inputs.chain([2, 0, 3], 70, "logits")
    names = ("target_logits", "draft_token_ids", "cu_num_draft_tokens", "temperature")
    args = (*(arguments.pop(name) for name in names), 3)
    torch.library.opcheck(verify_chain._op, args, {**arguments, "rule": "block"})
