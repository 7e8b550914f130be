"""Exact match in verify_chain, and the two samplers that it draws with."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import chi_square
import implementations
import inputs
import margins
import pytest
import random_chains
import specdec_ops
import torch
from implementations import REFERENCE, Implementation
from specdec_ops import Status, _reference
from specdec_ops.ops import verify_chain
from test_laws import CASE_A, CASE_T, Law, law
from torch import Tensor

EXTRAS = random_chains.EXTRAS
SAMPLERS = ("inverse_cdf", "gumbel")


def agreement(p: Law, q: Law) -> Fraction:
    """How probable it is that two laws give the same id under the same Gumbel noise."""
    return sum(
        (
            1 / sum((max(a / p[v], b / q[v]) for a, b in zip(p, q, strict=True)), Fraction(0))
            for v in range(len(p))
            if p[v] > 0 and q[v] > 0
        ),
        Fraction(0),
    )


@pytest.mark.parametrize("weights", [(1, 2), (2, 1, 1), (0, 3, 0, 1)], ids=str)
def test_every_draft_and_every_number(implementation: Implementation, weights: tuple[int, ...]) -> None:
    """A draft is accepted if it is the id at its number in the target's CDF; the id is emitted either way."""
    p = law(*weights)
    size, k, cells = len(p), 2, 12
    grid = [(cell + 0.5) / cells for cell in range(cells)]
    edges = list(itertools.accumulate(p))
    ids = [next(v for v, edge in enumerate(edges) if u < edge) for u in grid]
    jobs = list(itertools.product(range(size), range(size), range(cells), range(cells), (0, cells // 2)))
    out = implementation.verify_chain(
        inputs.logits_of([[float(v) for v in p]]).expand(len(jobs) * (k + 1), -1),
        torch.tensor([job[:2] for job in jobs]).flatten(),
        torch.arange(len(jobs) + 1) * k,
        accept_uniforms=torch.tensor([[grid[job[2]], grid[job[3]]] for job in jobs]).flatten(),
        recovered_uniforms=torch.tensor([grid[job[4]] for job in jobs]),
        rule="exact_match",
        return_accept_probs=True,
    )
    for (a, b, *numbers), tokens, n in zip(
        jobs, out.token_ids.tolist(), out.num_accepted.tolist(), strict=True
    ):
        drawn = [ids[cell] for cell in numbers]
        accepted = 0 if a != drawn[0] else 1 if b != drawn[1] else 2
        assert (n, tokens) == (accepted, drawn[: n + 1] + [-1] * (k - n))
    first = out.accept_probs.view(-1, k)[:, 0]
    assert first.tolist() == pytest.approx([float(p[job[0]]) for job in jobs], abs=1e-6)


class Model:
    """A target whose laws depend on the last two tokens."""

    vocab_size = 40

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def logits(self, context: tuple[int, ...]) -> Tensor:
        seed = hash((self.seed, *context[-2:])) % 2**31
        return 2.0 * torch.randn(self.vocab_size, generator=inputs.generator(seed))


Drafter = Callable[[tuple[int, ...], int, int, str], int]


def plain_stream(model: Model, seed: int, sampler: str, length: int) -> list[int]:
    tokens: list[int] = []
    for position in range(length):
        drawn = specdec_ops.sample(
            model.logits(tuple(tokens))[None],
            temperature=0.9,
            seeds=seed,
            positions=torch.tensor([position]),
            sampler=sampler,
        )
        tokens.append(int(drawn.token_ids))
    return tokens


def streams(
    op: Any, model: Model, seeds: list[int], drafter: Drafter, k: int, sampler: str, length: int
) -> tuple[list[list[int]], int]:
    """Each request decoded with drafts, all of them in one batch; and how many drafts were accepted."""
    tokens: list[list[int]] = [[] for _ in seeds]
    accepted = 0
    while min(map(len, tokens)) < length:
        rows, drafts = [], []
        for stream, seed in zip(tokens, seeds, strict=True):
            chain: tuple[int, ...] = tuple(stream)
            for slot in range(k):
                rows.append(model.logits(chain))
                chain += (drafter(chain, seed, slot, sampler),)
            rows.append(model.logits(chain))
            drafts += chain[len(stream) :]
        out = op(
            torch.stack(rows),
            torch.tensor(drafts),
            torch.arange(len(seeds) + 1) * k,
            temperature=0.9,
            seeds=torch.tensor(seeds),
            positions=torch.tensor([len(stream) for stream in tokens]),
            rule="exact_match",
            sampler=sampler,
        )
        accepted += int(out.num_accepted.sum())
        for stream, emitted, n in zip(tokens, out.token_ids.tolist(), out.num_accepted.tolist(), strict=True):
            stream += emitted[: n + 1]
    return [stream[:length] for stream in tokens], accepted


def constant(chain: tuple[int, ...], seed: int, slot: int, sampler: str) -> int:
    return 3


def argmax(chain: tuple[int, ...], seed: int, slot: int, sampler: str) -> int:
    return int(Model(1).logits(chain).argmax())


def coupled(chain: tuple[int, ...], seed: int, slot: int, sampler: str) -> int:
    """A draft model that is near the target, with the same noise."""
    noise = torch.randn(Model.vocab_size, generator=inputs.generator(len(chain)))
    drawn = specdec_ops.sample(
        (Model(1).logits(chain) + 0.4 * noise)[None],
        seeds=seed,
        positions=torch.tensor([len(chain) - slot]),
        draft_slot=slot,
        sampler=sampler,
    )
    return int(drawn.token_ids)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_streams_depend_on_seed_and_context_alone(default_native: Implementation, sampler: str) -> None:
    """Whatever the drafter, k, and batch: the stream of plain sampling."""
    model, length = Model(1), 24
    expected = {seed: plain_stream(model, seed, sampler, length) for seed in (1, 2, 3)}
    assert expected[1] != expected[2]
    accepted = {}
    for drafter, k, seeds in (
        (constant, 1, [1, 2, 3]),
        (argmax, 3, [2, 1]),
        (coupled, 2, [3, 1, 2]),
        (coupled, 5, [1]),
    ):
        found, accepted[drafter, k] = streams(
            default_native.verify_chain, model, seeds, drafter, k, sampler, length
        )
        assert found == [expected[seed] for seed in seeds]
    if sampler == "gumbel":
        assert accepted[coupled, 2] > 15 > accepted[constant, 1]


COUNT = 1 << 18


def rows_of(p: Law, count: int) -> Tensor:
    return inputs.logits_of([[float(v) for v in p]]).expand(count, -1)


@pytest.mark.parametrize(
    ("case", "expected"), [(CASE_A, Fraction(93, 140)), (CASE_T, Fraction(2, 3))], ids=["A", "T"]
)
def test_acceptance_of_shared_noise(
    default_native: Implementation, case: tuple[Law, Law], expected: Fraction
) -> None:
    """Between (1 - TV) / (1 + TV) and 1 - TV: 93/140 of 7/10 in case A; 3/10 for independent drafts."""
    p, q = case
    assert agreement(p, q) == expected
    tv = sum((abs(a - b) for a, b in zip(p, q, strict=True)), Fraction(0)) / 2
    assert (1 - tv) / (1 + tv) <= expected <= 1 - tv
    numbers = {"seeds": torch.arange(COUNT) * 7919, "positions": torch.arange(COUNT) % 1000}
    for shared in (True, False):
        drafts = default_native.sample(
            rows_of(q, COUNT), draft_slot=0, sampler="gumbel" if shared else "inverse_cdf", **numbers
        ).token_ids
        out = default_native.verify_chain(
            rows_of(p, 2 * COUNT),
            drafts,
            torch.arange(COUNT + 1),
            rule="exact_match",
            sampler="gumbel",
            **numbers,
        )
        rate = float(expected if shared else sum(a * b for a, b in zip(p, q, strict=True)))
        sigma = math.sqrt(rate * (1 - rate) / COUNT)
        # Two-sided p-value 6e-7.
        assert abs(float(out.num_accepted.double().mean()) - rate) < 5 * sigma
        counts = torch.bincount(out.token_ids[:, 0], minlength=len(p))
        assert chi_square.p_value(counts.tolist(), [float(v) for v in p]) > 1e-6


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_law_of_gumbel_sampling_is_the_softmax(default_native: Implementation, temperature: float) -> None:
    logits = torch.tensor([[0.0, 1.5, -2.0, 3.0, 0.5, -math.inf, -4.0]])
    out = default_native.sample(
        logits.expand(COUNT, -1),
        temperature=temperature,
        seeds=12,
        positions=torch.arange(COUNT),
        sampler="gumbel",
    )
    counts = torch.bincount(out.token_ids, minlength=7)
    expected = (logits[0].double() / temperature).softmax(0)
    assert chi_square.p_value(counts.tolist(), expected.tolist()) > 1e-6
    negative = chi_square.p_value(
        counts.tolist(), (logits[0].double() / temperature * 1.05).softmax(0).tolist()
    )
    assert negative < 1e-6


def test_tokens_in_a_row_are_independent(default_native: Implementation) -> None:
    """Positions, seeds and ids of a row have numbers of their own."""
    p = law(2, 1, 1)
    drawn = [
        default_native.sample(
            rows_of(p, COUNT),
            seeds=torch.arange(COUNT) + seed,
            positions=torch.full((COUNT,), at),
            sampler="gumbel",
        ).token_ids
        for seed, at in ((0, 0), (0, 1), (COUNT, 0), (0, 1 << 33))
    ]
    cells = sum(tokens * 3**i for i, tokens in enumerate(drawn))
    joint = [math.prod(float(p[cell // 3**i % 3]) for i in range(4)) for cell in range(81)]
    assert chi_square.p_value(torch.bincount(cells, minlength=81).tolist(), joint) > 1e-6


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("vocab_size", [1, 2, 63, 64, 65, 255, 257, 4095, 4096, 4097, 9001])
def test_tokens_match_the_reference(native: Implementation, vocab_size: int, sampler: str) -> None:
    draw = inputs.generator(vocab_size)
    for dtype in random_chains.DTYPES:
        logits = torch.randn(30, vocab_size, generator=draw).mul(3).to(dtype)
        arguments = {
            "temperature": 0.3 + torch.rand(30, generator=draw),
            "seeds": torch.randint(-(2**63), 2**63 - 1, (30,), generator=draw),
            "positions": torch.randint(0, 2**40, (30,), generator=draw),
            "sampler": sampler,
        }
        out = native.sample(inputs.strided(logits, 3, 1), **arguments)
        expected = REFERENCE.sample(logits, **arguments)
        assert torch.equal(out.token_ids, expected.token_ids)
        assert torch.equal(out.status, expected.status)
        padded = torch.cat([logits, torch.full((30, 70), 100.0, dtype=dtype)], 1)
        assert torch.equal(native.sample(padded, vocab_size=vocab_size, **arguments).token_ids, out.token_ids)


def test_noise_is_that_of_its_definition() -> None:
    """One value from the single-counter Philox, which is tested against published vectors."""
    seed, position, token = 77, (5 << 32) + 9, 64 * 3 + 16 * 2 + 5
    key = _reference.splitmix64(seed)
    words = _reference.philox4x32(
        (key & 0xFFFFFFFF, key >> 32), (16 * 3 + 5, 9, int(_reference.Stream.GUMBEL), 5)
    )
    u = (words[2] + 0.5) / 2**32
    assert _reference.gumbel_noise(seed, position, 300)[token] == pytest.approx(
        -math.log2(-math.log2(1 - u)), rel=1e-12
    )


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("uniforms", [False, True])
def test_awkward_batches_match_the_reference(
    default_native: Implementation, uniforms: bool, sampler: str
) -> None:
    if uniforms and sampler == "gumbel":
        return
    statuses: set[int] = set()
    lengths: set[int] = set()
    for seed in range(150):
        arguments, _, context = random_chains.random_chain(seed, vocab_sizes=(2, 7, 33, 300))
        if ("accept_uniforms" in arguments) != uniforms:
            continue
        options = {"rule": "exact_match", "sampler": sampler}
        out = default_native.verify_chain(**arguments, **options, **EXTRAS)
        expected = REFERENCE.verify_chain(**arguments, **options, **EXTRAS)
        statuses |= set(out.status.tolist())
        lengths |= set(out.num_accepted.tolist())
        for name in ("token_ids", "num_accepted", "status"):
            assert torch.equal(getattr(out, name), getattr(expected, name)), (name, context)
        for name in ("logprobs", "accept_probs"):
            torch.testing.assert_close(
                getattr(out, name), getattr(expected, name), equal_nan=True, rtol=2e-3, atol=2e-4
            )
    assert statuses == set(Status) - {Status.UNUSABLE_DRAFT_LAW} and lengths >= {0, 1, 2}


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_every_tier_and_number_of_threads_has_the_same_bits(num_threads: None, sampler: str) -> None:
    arguments = inputs.chain([4, 2, 0, 5], 40_000, "one_hot", seed=3, dtype=torch.bfloat16)
    arguments["draft_token_ids"][0] = specdec_ops.sample(
        arguments["target_logits"][:1],
        temperature=float(arguments["temperature"][0]),
        seeds=arguments["seeds"][:1],
        positions=arguments["positions"][:1],
        sampler=sampler,
    ).token_ids[0]
    results = []
    for name, threads in itertools.product(implementations.native_cpu_names(), (1, 2)):
        torch.set_num_threads(threads)
        with implementations.use(name) as tier:
            results.append(tier.verify_chain(**arguments, rule="exact_match", sampler=sampler, **EXTRAS))
    assert all(margins.all_same_bits(results[0], other) for other in results[1:])
    assert results[0].num_accepted[0] >= 1


def test_draft_laws_are_not_looked_at(implementation: Implementation) -> None:
    arguments = inputs.chain([3, 1, 2], 20, "logits", seed=5)
    without = {name: value for name, value in arguments.items() if not name.startswith("draft_logits")}
    arguments["draft_logits"].fill_(math.nan)
    assert margins.all_same_bits(
        implementation.verify_chain(**arguments, rule="exact_match", **EXTRAS),
        implementation.verify_chain(**without, rule="exact_match", **EXTRAS),
    )


def test_greedy_requests_and_given_bonus_tokens(implementation: Implementation) -> None:
    arguments = inputs.chain([3, 2, 4], 30, "one_hot", seed=2, temperature=torch.zeros(3))
    matched = implementation.verify_chain(**arguments, rule="exact_match", **EXTRAS)
    assert margins.all_same_bits(matched, implementation.verify_chain(**arguments, **EXTRAS))
    arguments = inputs.chain([1, 0], 2, "one_hot", seed=2, uniforms=True)
    arguments["accept_uniforms"].fill_(0.0)
    arguments["draft_token_ids"].fill_(0)
    given = inputs.without_bonus_rows(arguments, torch.tensor([1, 1]))
    out = implementation.verify_chain(**given, rule="exact_match")
    assert out.token_ids.tolist() == [[0, 1], [1, -1]]


def test_errors() -> None:
    chain = inputs.chain([2], 8, "one_hot", uniforms=True)
    logits = torch.zeros(1, 4)
    with pytest.raises(RuntimeError, match="verify_chain: sampler must be 'inverse_cdf' with uniforms, got"):
        specdec_ops.verify_chain(**chain, rule="exact_match", sampler="gumbel")
    with pytest.raises(RuntimeError, match="verify_chain: sampler must be 'inverse_cdf' unless rule is"):
        specdec_ops.verify_chain(**inputs.chain([2], 8, "one_hot"), sampler="gumbel")
    with pytest.raises(RuntimeError, match="sample: sampler must be 'inverse_cdf' or 'gumbel', got 'race'"):
        specdec_ops.sample(logits, seeds=1, positions=torch.zeros(1, dtype=torch.int64), sampler="race")
    with pytest.raises(RuntimeError, match="sample: sampler must be 'inverse_cdf' with uniforms, got 'gumb"):
        specdec_ops.sample(logits, uniforms=torch.zeros(1), sampler="gumbel")


def test_opcheck() -> None:
    arguments = inputs.chain([2, 0, 3], 70, "one_hot")
    names = ("target_logits", "draft_token_ids", "cu_num_draft_tokens", "temperature")
    args = (*(arguments.pop(name) for name in names), 3)
    options = {"rule": "exact_match", "sampler": "gumbel"}
    torch.library.opcheck(verify_chain._op, args, {**arguments, **options})
