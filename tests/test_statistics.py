"""Chi-square tests on 2^18 to 2^20 sequences, and the faults that they must catch.

What is compared is the joint law of the emitted tokens and the target's own continuation, drawn by
``sample`` at the positions that follow: marginals of the first token alone miss most faults.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import chi_square
import inputs
import pytest
import torch
from implementations import Implementation
from torch import Tensor

NUM_DRAWS = 1 << 20
FEWER_DRAWS = 1 << 18
LIMIT = 1e-6
DRAFT_LAWS = ["one_hot", "argmax", "logits", "logits_and_logsumexp", "probs", "support"]


@dataclass(frozen=True)
class MarkovModels:
    """Target and draft laws that depend on the token before."""

    target: Tensor
    draft: Tensor

    @property
    def vocab_size(self) -> int:
        return self.target.shape[1]

    def law(self, length: int) -> Tensor:
        """The target law of sequences that start after token 0, indexed in base ``vocab_size``."""
        p = self.target.double().softmax(-1)
        joint, last = torch.ones(1, dtype=torch.float64), torch.zeros(1, dtype=torch.int64)
        for _ in range(length):
            joint = (joint[:, None] * p[last]).flatten()
            last = torch.arange(self.vocab_size).repeat(last.shape[0])
        return joint


def markov_models(vocab_size: int, seed: int, *, noise: float = 0.8) -> MarkovModels:
    random = inputs.generator(seed)
    target = torch.randn(vocab_size, vocab_size, generator=random)
    return MarkovModels(target, target + noise * torch.randn(vocab_size, vocab_size, generator=random))


@dataclass
class Decoder:
    """Decodes many sequences side by side, one verification step at a time."""

    ops: Implementation
    models: MarkovModels
    seeds: Tensor
    start: Tensor
    length: int

    def __post_init__(self) -> None:
        batch = self.seeds.shape[0]
        self.tokens = torch.zeros(batch, self.length, dtype=torch.int64)
        self.last = torch.zeros(batch, dtype=torch.int64)
        self.count = torch.zeros(batch, dtype=torch.int64)

    def draft(self, k: int, how: str, positions: Tensor) -> tuple[Tensor, Tensor]:
        last, rows, ids = self.last, [self.last], []
        for slot in range(k):
            temperature = 0.0 if how == "argmax" else 1.0
            last = self.ops.sample(
                self.models.draft[last],
                temperature=temperature,
                seeds=self.seeds,
                positions=positions,
                draft_slot=slot,
            ).token_ids
            ids.append(last)
            rows.append(last)
        return torch.stack(ids, dim=1), torch.stack(rows, dim=1)

    def step(self, k: int, how: str, *, positions: Tensor | None = None, **changes: Any) -> None:
        """Drafts k tokens, verifies them, and appends what is emitted."""
        batch, vocab_size = self.seeds.shape[0], self.models.vocab_size
        positions = self.start + self.count if positions is None else positions
        ids, contexts = self.draft(k, how, positions)
        draft_logits = self.models.draft[contexts[:, :-1].flatten()]
        law: inputs.Arguments = {}
        if how in ("logits", "logits_and_logsumexp"):
            law["draft_logits"] = draft_logits
        if how == "logits_and_logsumexp":
            law["draft_logsumexp"] = draft_logits.double().logsumexp(-1)
        if how == "probs":
            law["draft_probs"] = draft_logits.softmax(-1)
        if how == "support":
            law["draft_support_ids"] = torch.arange(vocab_size).flip(0).expand(batch * k, vocab_size)
            law["draft_support_logprobs"] = draft_logits.log_softmax(-1).flip(1)
        arguments = {
            "target_logits": self.models.target[contexts.flatten()],
            "draft_token_ids": ids.flatten(),
            "cu_num_draft_tokens": torch.arange(batch + 1) * k,
            "seeds": self.seeds,
            "positions": positions,
            **law,
            **changes,
        }
        out = self.ops.verify_chain(**arguments)
        self.append(out.token_ids, out.num_accepted.long() + 1)

    def append(self, ids: Tensor, num: Tensor) -> None:
        for i in range(ids.shape[1]):
            live = (i < num) & (self.count + i < self.length)
            self.tokens[live, (self.count + i)[live]] = ids[live, i]
        self.last = ids.gather(1, (num - 1)[:, None]).squeeze(1)
        self.count = self.count + num

    def continue_plainly(self) -> None:
        """Fills each sequence up with the target's own tokens."""
        while (short := self.count < self.length).any():
            drawn = self.ops.sample(
                self.models.target[self.last[short]],
                seeds=self.seeds[short],
                positions=(self.start + self.count)[short],
            ).token_ids
            self.tokens[short, self.count[short]] = drawn
            self.last[short] = drawn
            self.count[short] += 1

    def p_value(self) -> float:
        self.continue_plainly()
        cell = torch.zeros(self.seeds.shape[0], dtype=torch.int64)
        for i in range(self.length):
            cell = cell * self.models.vocab_size + self.tokens[:, i]
        law = self.models.law(self.length)
        return chi_square.p_value(torch.bincount(cell, minlength=law.numel()), law)


def decoder(ops: Implementation, models: MarkovModels, length: int, num_draws: int = FEWER_DRAWS) -> Decoder:
    return Decoder(ops, models, torch.arange(num_draws), torch.full((num_draws,), 17), length)


def assert_joint_law(ops: Implementation, vocab_size: int, k: int, how: str, num_draws: int) -> None:
    run = decoder(ops, markov_models(vocab_size, seed=vocab_size), k + 1, num_draws)
    run.step(k, how)
    assert run.count.float().mean() > 1.02
    assert run.p_value() > LIMIT


@pytest.mark.parametrize("how", DRAFT_LAWS)
@pytest.mark.parametrize(("vocab_size", "k"), [(3, 3), (16, 2)])
def test_joint_law_of_emitted_tokens_and_continuation(
    default_native: Implementation, vocab_size: int, k: int, how: str
) -> None:
    """A1, A6, A14, A19, A40, A41, A43: every kind of drafter, joint over k + 1 tokens."""
    assert_joint_law(default_native, vocab_size, k, how, FEWER_DRAWS)


@pytest.mark.parametrize("how", ["one_hot", "logits"])
def test_joint_law_on_a_million_sequences(default_native: Implementation, how: str) -> None:
    assert_joint_law(default_native, 3, 2, how, NUM_DRAWS)


@pytest.mark.slow
@pytest.mark.parametrize("how", DRAFT_LAWS)
@pytest.mark.parametrize(("vocab_size", "k"), [(3, 3), (16, 2), (64, 1)])
def test_joint_law_of_every_case_on_a_million_sequences(
    default_native: Implementation, vocab_size: int, k: int, how: str
) -> None:
    assert_joint_law(default_native, vocab_size, k, how, NUM_DRAWS)


def assert_joint_law_over_two_steps(ops: Implementation, how: str, num_draws: int) -> None:
    run = decoder(ops, markov_models(4, seed=21), 5, num_draws)
    run.step(2, how)
    run.step(2, how)
    assert run.p_value() > LIMIT


@pytest.mark.parametrize("how", DRAFT_LAWS)
def test_joint_law_over_two_steps(default_native: Implementation, how: str) -> None:
    """Seeds stay and positions advance, as in a decoding loop: reused keys would show here."""
    assert_joint_law_over_two_steps(default_native, how, FEWER_DRAWS)


@pytest.mark.slow
@pytest.mark.parametrize("how", DRAFT_LAWS)
def test_joint_law_over_two_steps_on_a_million_sequences(default_native: Implementation, how: str) -> None:
    assert_joint_law_over_two_steps(default_native, how, NUM_DRAWS)


def test_joint_law_of_one_seed_at_many_positions(default_native: Implementation) -> None:
    models = markov_models(4, seed=22)
    seeds = torch.full((FEWER_DRAWS,), -12345)
    run = Decoder(default_native, models, seeds, torch.arange(FEWER_DRAWS) * 6, 5)
    run.step(2, "logits")
    run.step(2, "logits")
    assert run.p_value() > LIMIT


def test_joint_law_of_neighbouring_seeds_of_one_position(default_native: Implementation) -> None:
    """A32: pairs of requests, and acceptance against recovered token, are independent."""
    models = markov_models(3, seed=23)
    run = decoder(default_native, models, 2)
    run.step(1, "logits")
    run.continue_plainly()
    cell = run.tokens[:, 0] * 3 + run.tokens[:, 1]
    pair = cell[0::2] * 9 + cell[1::2]
    law = models.law(2)
    assert chi_square.p_value(torch.bincount(pair, minlength=81), torch.outer(law, law)) > LIMIT


def test_joint_law_in_small_of_every_implementation(implementation: Implementation) -> None:
    run = decoder(implementation, markov_models(3, seed=24), 3, 1 << 12)
    run.step(2, "logits")
    assert run.p_value() > LIMIT


@pytest.mark.parametrize("how", ["logits", "one_hot"])
def test_acceptance_rate_is_the_overlap(default_native: Implementation, how: str) -> None:
    """A14, A40, A41: sum of min(p, q) with a law, sum of p q without."""
    models = markov_models(50, seed=25)
    run = decoder(default_native, models, 1)
    run.step(1, how)
    p, q = models.target[0].double().softmax(-1), models.draft[0].double().softmax(-1)
    rate = float(torch.minimum(p, q).sum() if how == "logits" else (p * q).sum())
    measured = float((run.count == 2).double().mean())
    assert abs(measured - rate) < 5 * (rate * (1 - rate) / FEWER_DRAWS) ** 0.5


def first_token_p_value(token_ids: Tensor, p: list[float]) -> float:
    return chi_square.p_value(torch.bincount(token_ids[:, 0], minlength=len(p)), p)


P = [0.35, 0.1, 0.3, 0.25]
Q = [0.1, 0.4, 0.15, 0.35]


def verify_one(
    ops: Implementation, drafts: Tensor, accept: Tensor, recovered: Tensor, told: list[float]
) -> Tensor:
    n = drafts.shape[0]
    return ops.verify_chain(
        inputs.logits_of([P]).expand(2 * n, len(P)),
        drafts,
        torch.arange(n + 1),
        draft_probs=torch.tensor([told]).expand(n, len(told)),
        accept_uniforms=accept,
        recovered_uniforms=recovered,
    ).token_ids


def inverse_cdf(law: list[float], u: Tensor) -> Tensor:
    return torch.searchsorted(torch.tensor(law, dtype=torch.float64).cumsum(0)[:-1], u, right=True)


def independent(seed: int, count: int) -> list[Tensor]:
    random = inputs.generator(seed)
    return [torch.rand(FEWER_DRAWS, generator=random, dtype=torch.float64) for _ in range(count)]


Control = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
CONTROLS: dict[str, Control] = {
    "draft-noise-as-recovered": lambda draft, accept, recovered: (draft, accept, draft),
    "draft-noise-as-coin": lambda draft, accept, recovered: (draft, draft, recovered),
    "coin-as-recovered": lambda draft, accept, recovered: (draft, accept, accept),
    "constant-coin": lambda draft, accept, recovered: (draft, torch.zeros_like(accept), recovered),
}


def test_independent_uniforms_pass(default_native: Implementation) -> None:
    draft, accept, recovered = independent(31, 3)
    emitted = verify_one(default_native, inverse_cdf(Q, draft), accept, recovered, Q)
    assert first_token_p_value(emitted, P) > LIMIT


@pytest.mark.parametrize("name", CONTROLS)
def test_shared_noise_is_caught(default_native: Implementation, name: str) -> None:
    """A14, A19, A32: the statistics see one stream used for two purposes."""
    draft, accept, recovered = CONTROLS[name](*independent(32, 3))
    emitted = verify_one(default_native, inverse_cdf(Q, draft), accept, recovered, Q)
    assert first_token_p_value(emitted, P) < LIMIT


def test_raw_instead_of_processed_draft_law_is_caught(default_native: Implementation) -> None:
    """A2: drafts from the top 2 of q, verified with q itself; with the truncated law it passes."""
    draft, accept, recovered = independent(33, 3)
    truncated = [0.0, 0.4 / 0.75, 0.0, 0.35 / 0.75]
    drafts = inverse_cdf(truncated, draft)
    assert first_token_p_value(verify_one(default_native, drafts, accept, recovered, Q), P) < LIMIT
    assert first_token_p_value(verify_one(default_native, drafts, accept, recovered, truncated), P) > LIMIT


def test_a_draft_temperature_that_was_not_used_is_caught(default_native: Implementation) -> None:
    """A3."""
    models = markov_models(8, seed=34)
    for told, passes in [(1.0, True), (0.5, False)]:
        run = decoder(default_native, models, 3)
        run.step(2, "logits", draft_temperature=told)
        assert (run.p_value() > LIMIT) == passes


def test_value_dependent_pruning_is_caught(default_native: Implementation) -> None:
    """U2: dropping the draft when it is 2 gives (3/5, 13/40, 3/40) for p = (1/2, 1/4, 1/4)."""
    p, q = [0.5, 0.25, 0.25], [0.2, 0.5, 0.3]
    draft, accept, recovered = independent(35, 3)
    ids = inverse_cdf(q, draft)
    pruned = default_native.verify_chain(
        inputs.logits_of([p]).expand(2 * FEWER_DRAWS, 3),
        torch.where(ids == 2, -1, ids),
        torch.arange(FEWER_DRAWS + 1),
        draft_probs=torch.tensor([q]).expand(FEWER_DRAWS, 3),
        accept_uniforms=accept,
        recovered_uniforms=recovered,
    ).token_ids
    assert first_token_p_value(pruned, p) < LIMIT
    assert first_token_p_value(pruned, [3 / 5, 13 / 40, 3 / 40]) > LIMIT


def test_positions_that_do_not_advance_are_caught(default_native: Implementation) -> None:
    """The second step draws with the first step's numbers."""
    run = decoder(default_native, markov_models(4, seed=36), 5)
    run.step(2, "logits")
    run.step(2, "logits", positions=run.start)
    assert run.p_value() < LIMIT


def test_a_continuation_that_reuses_the_recovered_draw_is_caught(default_native: Implementation) -> None:
    """One position late in the loop: the next token is drawn with the number of the last."""
    run = decoder(default_native, markov_models(4, seed=37), 3)
    run.step(1, "logits")
    run.start = run.start - 1
    assert run.p_value() < LIMIT


def test_drafts_drawn_with_the_target_s_stream_are_caught(default_native: Implementation) -> None:
    """A19: a drafter that calls the plain sampler shares the recovered token's number."""
    models = markov_models(6, seed=38)
    run = decoder(default_native, models, 2)
    ids = default_native.sample(models.draft[run.last], seeds=run.seeds, positions=run.start).token_ids
    out = default_native.verify_chain(
        models.target[torch.stack([run.last, ids], dim=1).flatten()],
        ids,
        torch.arange(FEWER_DRAWS + 1),
        draft_logits=models.draft[run.last],
        seeds=run.seeds,
        positions=run.start,
    )
    run.append(out.token_ids, out.num_accepted.long() + 1)
    assert run.p_value() < LIMIT
