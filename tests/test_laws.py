"""Exact laws: thresholds read off by injected uniforms, put together as rationals say.

Every conditional step of an op is a comparison of one uniform with one threshold. Bisection on the
uniform reads the thresholds; with them the law of whatever the op emits is a finite sum, which is
compared with the same sum over Fractions.
"""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from collections.abc import Callable
from fractions import Fraction

import inputs
import pytest
import torch
from implementations import Implementation

Sequence = tuple[int, ...]
Law = tuple[Fraction, ...]
Model = Callable[[Sequence], Law]
#: Thresholds carry the float32 rounding of the logits and of the kernels.
TOLERANCE = 1e-6
BRACKET = 2e-7
NUM_BISECTIONS = 23


def law(*weights: int) -> Law:
    return tuple(Fraction(w, sum(weights)) for w in weights)


def context_free(p: Law) -> Model:
    return lambda context: p


def random_model(seed: int, vocab_size: int, *, zeros: bool = False) -> Model:
    """A law for each context, of small integer weights."""
    cache: dict[Sequence, Law] = {}

    def model(context: Sequence) -> Law:
        if context not in cache:
            dice = random.Random(f"{seed} {context}")
            weights = [dice.randint(0 if zeros else 1, 9) for _ in range(vocab_size)]
            cache[context] = law(*weights) if any(weights) else law(*[1] * vocab_size)
        return cache[context]

    return model


def residual(p: Law, q: Law) -> Law:
    rest = [max(a - b, Fraction(0)) for a, b in zip(p, q, strict=True)]
    return tuple(r / sum(rest) for r in rest) if sum(rest) else p


CASE_A = (law(2, 1, 1), law(2, 5, 3))
CASE_T = (law(1, 2), law(2, 1))
MODELS: dict[str, tuple[Model, Model, int, int]] = {
    "case-a": (context_free(CASE_A[0]), context_free(CASE_A[1]), 3, 3),
    "case-t": (context_free(CASE_T[0]), context_free(CASE_T[1]), 2, 3),
    "random-v3": (random_model(1, 3), random_model(2, 3), 3, 2),
    "random-v4": (random_model(3, 4), random_model(4, 4), 4, 2),
    "random-v2-k3": (random_model(5, 2), random_model(6, 2), 2, 3),
    "zeros-v4": (random_model(7, 4, zeros=True), random_model(8, 4, zeros=True), 4, 2),
}


class Probe:
    """Reads thresholds of ``verify_chain`` for chains of one length."""

    def __init__(
        self,
        implementation: Implementation,
        target: Model,
        draft: Model,
        vocab_size: int,
        k: int,
        draft_law: str,
    ) -> None:
        self.implementation = implementation
        self.target, self.draft = target, draft
        self.vocab_size, self.k, self.draft_law = vocab_size, k, draft_law

    def _arguments(self, paths: list[Sequence], context: Sequence) -> inputs.Arguments:
        target = [
            [float(p) for p in self.target((*context, *path[:i]))]
            for path in paths
            for i in range(self.k + 1)
        ]
        draft = [
            [float(q) for q in self.draft((*context, *path[:i]))] for path in paths for i in range(self.k)
        ]
        arguments: inputs.Arguments = {
            "target_logits": inputs.logits_of(target),
            "draft_token_ids": torch.tensor([x for path in paths for x in path]),
            "cu_num_draft_tokens": torch.arange(len(paths) + 1) * self.k,
        }
        if self.draft_law == "logits":
            arguments["draft_logits"] = inputs.logits_of(draft)
        elif self.draft_law == "logits_and_logsumexp":
            arguments["draft_logits"] = inputs.logits_of(draft)
            arguments["draft_logsumexp"] = torch.zeros(len(draft), dtype=torch.float64)
        elif self.draft_law == "probs":
            arguments["draft_probs"] = torch.tensor(draft)
        elif self.draft_law == "support":
            width = self.vocab_size + 1
            arguments["draft_support_ids"] = torch.tensor(
                [[v if row[v] > 0 else -1 for v in range(self.vocab_size)] + [-1] for row in draft]
            )
            logprobs = torch.zeros(len(draft), width)
            logprobs[:, : self.vocab_size] = inputs.logits_of(draft)
            arguments["draft_support_logprobs"] = logprobs
        return arguments

    def _bisect(
        self, guesses: list[Fraction], is_below: Callable[[torch.Tensor], torch.Tensor]
    ) -> list[float]:
        """The uniform at which each of some monotonic predicates turns false, to within ``BRACKET``.

        A guess that the predicates confirm on both sides spares the bisection.
        """
        guess = torch.tensor([float(g) for g in guesses], dtype=torch.float64)
        low, high = (guess - BRACKET).clamp(min=0), (guess + BRACKET).clamp(max=1)
        confirmed = (low == 0) | is_below(low)
        confirmed &= (high == 1) | ~is_below(high.clamp(max=1 - 2.0**-53))
        if not confirmed.all():
            low, high = torch.zeros_like(guess), torch.ones_like(guess)
            for _ in range(NUM_BISECTIONS):
                middle = (low + high) / 2
                below = is_below(middle)
                low, high = torch.where(below, middle, low), torch.where(below, high, middle)
        return ((low + high) / 2).tolist()

    def _run(
        self, jobs: list[tuple[Sequence, int]], context: Sequence, coin: torch.Tensor, last: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Number accepted, and the token after, with a coin for draft ``i`` of each job's path."""
        coins = torch.zeros(len(jobs), self.k, dtype=torch.float64)
        for row, (_, i) in enumerate(jobs):
            if i < self.k:
                coins[row, i] = coin[row]
        out = self.implementation.verify_chain(
            **self._arguments([path for path, _ in jobs], context),
            accept_uniforms=coins.flatten(),
            recovered_uniforms=last,
        )
        return out.num_accepted, out.token_ids.gather(1, out.num_accepted.long()[:, None]).squeeze(1)

    def _told(self, path: Sequence, i: int, context: Sequence) -> Law:
        if self.draft_law == "one_hot":
            return tuple(Fraction(v == path[i]) for v in range(self.vocab_size))
        return self.draft((*context, *path[:i]))

    def _exact_acceptance(self, path: Sequence, i: int, context: Sequence) -> Fraction:
        p, q = self.target((*context, *path[:i])), self._told(path, i, context)
        return min(Fraction(1), p[path[i]] / q[path[i]])

    def _exact_last_law(self, path: Sequence, i: int, context: Sequence) -> Law:
        p = self.target((*context, *path[:i]))
        if i == self.k:
            return p
        return residual(p, self._told(path, i, context))

    def accept_thresholds(self, jobs: list[tuple[Sequence, int]], context: Sequence) -> list[float]:
        """For each (path, i): how probable it is that draft i is accepted once those before it are."""
        last = torch.zeros(len(jobs), dtype=torch.float64)
        slots = torch.tensor([i for _, i in jobs])
        guesses = [self._exact_acceptance(path, i, context) for path, i in jobs]
        return self._bisect(guesses, lambda u: self._run(jobs, context, u, last)[0] > slots)

    def last_laws(self, jobs: list[tuple[Sequence, int]], context: Sequence) -> list[list[float]]:
        """For each (path, i): the law of the token after a rejection of draft i, or of the bonus."""
        edges = [(job, v) for job in jobs for v in range(self.vocab_size - 1)]
        reject = torch.full((len(edges),), 1 - 2.0**-53, dtype=torch.float64)
        slots = torch.tensor([i for (_, i), _ in edges])
        ids = torch.tensor([v for _, v in edges])

        def is_below(u: torch.Tensor) -> torch.Tensor:
            accepted, token = self._run([job for job, _ in edges], context, reject, u)
            assert torch.equal(accepted, slots.int())
            return token <= ids

        exact = [self._exact_last_law(path, i, context) for (path, i) in jobs]
        guesses = [edge for weights in exact for edge in itertools.accumulate(weights[:-1])]
        prefix = iter(self._bisect(guesses, is_below))
        laws = []
        for _ in jobs:
            edge = [0.0, *(next(prefix) for _ in range(self.vocab_size - 1)), 1.0]
            laws.append([high - low for low, high in itertools.pairwise(edge)])
        return laws

    def emitted_law(self, context: Sequence = ()) -> dict[Sequence, float]:
        """The law of the emitted sequence when the drafts are drawn from the draft model."""
        paths = [
            path
            for path in itertools.product(range(self.vocab_size), repeat=self.k)
            if all(self.draft((*context, *path[:i]))[x] > 0 for i, x in enumerate(path))
        ]
        reached = {(path[: i + 1], i): path for path in paths for i in range(self.k)}
        jobs = [(path, i) for (_, i), path in reached.items()]
        threshold = dict(zip(reached, self.accept_thresholds(jobs, context), strict=True))

        def reach(prefix: Sequence) -> float:
            """How probable it is that these drafts are drawn and all accepted."""
            value = 1.0
            for i, x in enumerate(prefix):
                value *= float(self.draft((*context, *prefix[:i]))[x]) * threshold[prefix[: i + 1], i]
            return value

        ends = {
            key: path
            for key, path in reached.items()
            if reach(key[0][:-1]) > 1e-6 and threshold[key] < 1 - 1e-6
        }
        ends |= {(path, self.k): path for path in paths if reach(path) > 1e-6}
        laws = self.last_laws([(path, i) for (_, i), path in ends.items()], context) if ends else []
        emitted: dict[Sequence, float] = defaultdict(float)
        for (prefix, i), last in zip(ends, laws, strict=True):
            kept = prefix[:i]
            weight = reach(kept)
            if i < self.k:
                weight *= float(self.draft((*context, *kept))[prefix[i]]) * (1 - threshold[prefix, i])
            for y, share in enumerate(last):
                emitted[(*kept, y)] += weight * share
        return emitted


def continued(
    emitted: dict[Sequence, float], target: Model, vocab_size: int, length: int
) -> dict[Sequence, float]:
    """The law of the emitted tokens followed by the target's own, cut to one length."""
    result: dict[Sequence, float] = defaultdict(float)
    for tokens, weight in emitted.items():
        if len(tokens) >= length:
            result[tokens[:length]] += weight
            continue
        for y in range(vocab_size):
            p = float(target(tokens)[y])
            for sequence, share in continued({(*tokens, y): weight * p}, target, vocab_size, length).items():
                result[sequence] += share
    return result


def target_law(target: Model, vocab_size: int, length: int) -> dict[Sequence, Fraction]:
    result = {(): Fraction(1)}
    for _ in range(length):
        result = {(*s, y): w * target(s)[y] for s, w in result.items() for y in range(vocab_size)}
    return result


def assert_laws_agree(measured: dict[Sequence, float], exact: dict[Sequence, Fraction]) -> None:
    for sequence in measured.keys() | exact.keys():
        got, want = measured.get(sequence, 0.0), float(exact.get(sequence, Fraction(0)))
        assert got == pytest.approx(want, abs=TOLERANCE), sequence


def exact_emitted_law(
    target: Model, draft: Model, vocab_size: int, k: int, *, one_hot: bool
) -> dict[Sequence, Fraction]:
    """Token-level speculative sampling over rationals, as in arXiv 2211.17192."""
    emitted: dict[Sequence, Fraction] = defaultdict(Fraction)
    reach = {(): Fraction(1)}
    for _ in range(k):
        following: dict[Sequence, Fraction] = {}
        for prefix, weight in reach.items():
            p, q = target(prefix), draft(prefix)
            for x in range(vocab_size):
                if q[x] == 0:
                    continue
                told = tuple(Fraction(v == x) for v in range(vocab_size)) if one_hot else q
                accept = min(Fraction(1), p[x] / told[x])
                following[(*prefix, x)] = weight * q[x] * accept
                for y, share in enumerate(residual(p, told)):
                    emitted[(*prefix, y)] += weight * q[x] * (1 - accept) * share
        reach = following
    for prefix, weight in reach.items():
        for y in range(vocab_size):
            emitted[(*prefix, y)] += weight * target(prefix)[y]
    return emitted


def mean_accepted(emitted: dict[Sequence, float]) -> float:
    return sum((len(tokens) - 1) * weight for tokens, weight in emitted.items())


@pytest.mark.parametrize("draft_law", inputs.DRAFT_LAWS)
@pytest.mark.parametrize("name", MODELS)
def test_emitted_law_is_the_exact_one(implementation: Implementation, name: str, draft_law: str) -> None:
    target, draft, vocab_size, k = MODELS[name]
    emitted = Probe(implementation, target, draft, vocab_size, k, draft_law).emitted_law()
    assert_laws_agree(
        emitted, exact_emitted_law(target, draft, vocab_size, k, one_hot=draft_law == "one_hot")
    )
    joint = continued(emitted, target, vocab_size, k + 1)
    assert_laws_agree(joint, target_law(target, vocab_size, k + 1))


@pytest.mark.parametrize("draft_law", ["one_hot", "logits", "support"])
def test_joint_law_of_two_steps_is_the_target_s(implementation: Implementation, draft_law: str) -> None:
    vocab_size, k = 2, 2
    target, draft = random_model(11, vocab_size), random_model(12, vocab_size)
    probe = Probe(implementation, target, draft, vocab_size, k, draft_law)
    joint: dict[Sequence, float] = defaultdict(float)
    for first, weight in probe.emitted_law().items():
        for second, share in probe.emitted_law(first).items():
            joint[(*first, *second)] += weight * share
    length = 2 * (k + 1)
    assert_laws_agree(continued(joint, target, vocab_size, length), target_law(target, vocab_size, length))


@pytest.mark.parametrize(
    ("case", "k", "expected"),
    [
        (CASE_A, 1, Fraction(7, 10)),
        (CASE_A, 2, Fraction(119, 100)),
        (CASE_A, 3, Fraction(1533, 1000)),
        (CASE_A, 4, Fraction(17731, 10000)),
        (CASE_T, 1, Fraction(2, 3)),
        (CASE_T, 2, Fraction(10, 9)),
        (CASE_T, 3, Fraction(38, 27)),
        (CASE_T, 4, Fraction(130, 81)),
    ],
    ids=lambda value: str(value) if not isinstance(value, tuple) else f"v{len(value[0])}",
)
def test_mean_accepted_equals_the_goldens(
    implementation: Implementation, case: tuple[Law, Law], k: int, expected: Fraction
) -> None:
    """A21: 10/9 for the token-level rule on the toy of block verification."""
    p, q = case
    emitted = Probe(implementation, context_free(p), context_free(q), len(p), k, "logits").emitted_law()
    assert mean_accepted(emitted) == pytest.approx(float(expected), abs=4 * TOLERANCE)


def test_emitted_law_of_the_paper_s_toy(implementation: Implementation) -> None:
    p, q = CASE_T
    emitted = Probe(implementation, context_free(p), context_free(q), 2, 2, "logits").emitted_law()
    golden = {(1,): Fraction(1, 3), (0, 1): Fraction(1, 9), (1, 1): Fraction(1, 9)}
    for a, b in itertools.product(range(2), repeat=2):
        golden[a, b, 0], golden[a, b, 1] = Fraction(1, 27), Fraction(2, 27)
    assert_laws_agree(emitted, golden)


def test_residual_of_case_a_is_one_hot(implementation: Implementation) -> None:
    p, q = CASE_A
    grid = torch.arange(64, dtype=torch.float64) / 64
    for x in (1, 2):
        out = implementation.sample_recovered(
            inputs.logits_of([[float(v) for v in p]]).expand(64, 3),
            torch.full((64,), x),
            draft_logits=inputs.logits_of([[float(v) for v in q]]).expand(64, 3),
            uniforms=grid,
        )
        assert out.token_ids.unique().tolist() == [0]


@pytest.mark.parametrize("draft_law", inputs.DRAFT_LAWS)
def test_residual_of_a_wrong_stop_rule_is_not_drawn(implementation: Implementation, draft_law: str) -> None:
    """A22 (iii): the residual of Mb=[.5,.4,.1], Ms=[.1,.25,.65] is [.727,.273,0] at token level."""
    target, draft = context_free(law(50, 40, 10)), context_free(law(10, 25, 65))
    probe = Probe(implementation, target, draft, 3, 1, draft_law)
    (recovered,) = probe.last_laws([((2,), 0)], ())
    expected = [5 / 9, 4 / 9, 0] if draft_law == "one_hot" else [8 / 11, 3 / 11, 0]
    assert recovered == pytest.approx(expected, abs=TOLERANCE)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("weights", [(1, 2), (2, 1, 1), (0, 3, 0, 1), (1, 1, 1, 1)], ids=str)
def test_law_of_sample_is_the_softmax(
    implementation: Implementation, weights: tuple[int, ...], temperature: float
) -> None:
    logits = inputs.logits_of([[float(p) for p in law(*weights)]])
    powers = [w ** (1 / temperature) for w in weights]
    edges = list(itertools.accumulate(w / sum(powers) for w in powers))[:-1]
    for v, edge in enumerate(edges):
        probes = torch.tensor([edge * (1 - 1e-6), edge * (1 + 1e-6)], dtype=torch.float64)
        tokens = implementation.sample(
            logits.expand(2, -1), temperature=temperature, uniforms=probes
        ).token_ids.tolist()
        assert (edge == 0 or tokens[0] <= v) and (edge >= 1 - 1e-6 or tokens[1] > v)


@pytest.mark.parametrize(
    ("told", "drawn", "expected"),
    [
        ((0.8, 0.2), (1, 0), (0.75, 0.25)),
        (None, (1, 0), (0.6, 0.4)),
        ((1.0, 0.0), (1, 0), (0.6, 0.4)),
        (None, (0.8, 0.2), (0.6, 0.4)),
        ((0.8, 0.2), (0.8, 0.2), (0.6, 0.4)),
    ],
    ids=["A1-wrong-law", "A1-none", "A1-A43-one-hot", "A6-none", "right-law"],
)
def test_first_token_law_of_drafters_and_what_they_tell(
    implementation: Implementation,
    told: tuple[float, float] | None,
    drawn: tuple[float, float],
    expected: tuple[float, float],
) -> None:
    """A1, A6, A43: no law told is exact for every drafter; a law that was not drawn from is not."""
    assert_first_token_law(implementation, (0.6, 0.4), told, drawn, expected)


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ((0.5, 0.3, 0.15, 0.05), (0.5, 0.375, 0.0625, 0.0625)),
        ((0.625, 0.375, 0.0, 0.0), (0.4, 0.3, 0.2, 0.1)),
    ],
    ids=["raw", "truncated"],
)
def test_law_told_must_be_the_truncated_one(
    implementation: Implementation, told: tuple[float, ...], expected: tuple[float, ...]
) -> None:
    """A2: drafts from the top 2 of q, verified with the raw q and with the law they came from."""
    assert_first_token_law(implementation, (0.4, 0.3, 0.2, 0.1), told, (0.625, 0.375, 0.0, 0.0), expected)


@pytest.mark.parametrize("draft_temperature", [0.5, 1.0], ids=["told-at-0.5", "told-at-1"])
def test_draft_temperature_must_be_the_drafter_s(
    implementation: Implementation, draft_temperature: float
) -> None:
    """A3: drafts drawn at temperature 1 while the target runs at 0.5."""
    logits = torch.tensor([[2.0, 1.5, 1.0, 0.5]])
    target = torch.tensor([[0.1125, 0.8310, 0.0414, 0.0152]], dtype=torch.float64)
    target_logits = (target.log() * 0.5).float()
    drawn = logits.double().softmax(-1)[0].tolist()
    told = (logits.double() / draft_temperature).softmax(-1)[0].tolist()
    right = draft_temperature == 1.0
    expected = target[0].tolist() if right else [0.0795, 0.7928, 0.0795, 0.0482]
    measured = first_token_law(
        implementation,
        drawn,
        target_logits=target_logits,
        temperature=0.5,
        draft_logits=logits,
        draft_temperature=draft_temperature,
    )
    assert measured == pytest.approx(expected, abs=3e-3)
    assert right == (max(abs(a - b) for a, b in zip(told, drawn, strict=True)) < 1e-9)


def first_token_law(implementation: Implementation, drawn: list[float], **arguments: object) -> list[float]:
    """The law of the first token, with the drafts drawn as given: accept and residual read off a grid."""
    cells = 1024
    grid = (torch.arange(cells, dtype=torch.float64) + 0.5) / cells
    target_logits = arguments.pop("target_logits")
    assert isinstance(target_logits, torch.Tensor)
    vocab_size = target_logits.shape[1]
    result = [0.0] * vocab_size
    for x, weight in enumerate(drawn):
        if weight == 0:
            continue
        rows = {
            name: value.expand(cells, vocab_size) if isinstance(value, torch.Tensor) else value
            for name, value in arguments.items()
        }
        out = implementation.verify_chain(
            target_logits.expand(2 * cells, vocab_size),
            torch.full((cells,), x),
            torch.arange(cells + 1),
            accept_uniforms=grid,
            recovered_uniforms=(grid * 977) % 1.0,
            **rows,
        )
        counts = torch.bincount(out.token_ids[:, 0], minlength=vocab_size)
        result = [a + weight * int(n) / cells for a, n in zip(result, counts, strict=True)]
    return result


def assert_first_token_law(
    implementation: Implementation,
    p: tuple[float, ...],
    told: tuple[float, ...] | None,
    drawn: tuple[float, ...],
    expected: tuple[float, ...],
) -> None:
    arguments = {} if told is None else {"draft_probs": torch.tensor([told])}
    measured = first_token_law(implementation, list(drawn), target_logits=inputs.logits_of([p]), **arguments)
    assert measured == pytest.approx(expected, abs=3e-3)
