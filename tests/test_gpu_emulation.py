"""The GPU's chain program on an emulated device: the CPU's results to the bit, in any order of threads."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import implementations
import inputs
import margins
import pytest
import random_chains
import specdec_ops
import test_draft_vocabulary
import test_logit_processors
import test_row_statistics
import test_token_logprobs
import torch
from specdec_ops.rules import Lenience

EMULATED = implementations.Implementation(implementations.EMULATED)
VOCAB_SIZES = [size for size in random_chains.VOCAB_SIZES if size < 10_000]
PLACES = ((0, 0), (0, 0), (8, 8), (3, 1), (2, 2), (4, 0))
Seeds = Callable[[int], range]


@pytest.fixture(params=["any order", "in order"])
def seeds(request: pytest.FixtureRequest) -> Iterator[Seeds]:
    """Seeds for a number of calls whose threads run in a random order, or for a tenth as many in order."""
    library, _ = implementations.emulation()
    library.set_emulation_seed(0 if request.param == "in order" else 1)
    yield lambda count: range(count // 10 if request.param == "in order" else count)
    library.set_emulation_seed(0)


def placed(arguments: inputs.Arguments, seed: int) -> inputs.Arguments:
    """The same arguments, with rows in a wider buffer."""
    gap, offset = random.Random(seed).choice(PLACES)
    rows = ("target_logits", "draft_logits", "draft_probs", "logits")
    return {
        name: inputs.strided(value, gap, offset, random_chains.NAN) if name in rows else value
        for name, value in arguments.items()
    }


def assert_same_bits(op: str, arguments: inputs.Arguments, seed: int, context: str) -> None:
    here: Any = getattr(specdec_ops, op)(**arguments)
    there: Any = getattr(EMULATED, op)(**placed(arguments, seed))
    for name, a, b in zip(here._fields, here, there, strict=True):
        assert (a is None and b is None) or margins.same_bits(a, b), f"{name} of {context}: {a}\n{b}"


def test_verify_chain_has_the_bits_of_the_cpu(seeds: Seeds) -> None:
    for seed in seeds(60):
        arguments, flags, context = random_chains.random_chain(seed, vocab_sizes=VOCAB_SIZES)
        assert_same_bits("verify_chain", {**arguments, **flags}, seed, context)


@pytest.mark.parametrize("option", random_chains.OPTIONS)
def test_options_of_verify_chain_have_the_bits_of_the_cpu(option: str, seeds: Seeds) -> None:
    for seed in seeds(20):
        arguments, flags, context = random_chains.random_chain_with(option, seed, VOCAB_SIZES)
        assert_same_bits("verify_chain", {**arguments, **flags}, seed, context)


@pytest.mark.parametrize("law", inputs.DRAFT_LAWS)
def test_more_blocks_than_fit_shared_memory_at_once(law: str, seeds: Seeds) -> None:
    for seed in seeds(10)[:2]:
        arguments = inputs.chain([2], 270_000, law, seed=seed, dtype=torch.bfloat16, scale=0.1, noise=3.0)
        assert_same_bits("verify_chain", arguments, seed, f"seed {seed}, {law}")
        assert_same_bits("verify_chain", {**arguments, **random_chains.EXTRAS}, seed, f"seed {seed}, {law}")


@pytest.mark.parametrize("law", ["one_hot", "logits"])
def test_units_of_several_blocks(law: str, seeds: Seeds) -> None:
    for seed in seeds(120)[:12]:
        choice = random.Random(seed)
        temperature = torch.tensor([0.0, 0.6, 0.8, 1.0])
        dtype = choice.choice(random_chains.DTYPES)
        arguments = inputs.chain([3, 2, 3, 1], 36_000, law, seed=seed, dtype=dtype, temperature=temperature)
        if choice.random() < 0.3:
            random_chains.spoil(arguments["target_logits"], choice)
        flags = random_chains.EXTRAS if choice.random() < 0.4 else {}
        context = f"seed {seed}, {law}, {dtype}, {flags}"
        assert_same_bits("verify_chain", {**arguments, **flags}, seed, context)


@pytest.mark.parametrize("law", ["logits", "logits_and_logsumexp", "probs"])
def test_residuals_that_several_ctas_make(law: str, seeds: Seeds) -> None:
    for seed in seeds(20)[:4]:
        arguments = inputs.chain(
            [2, 1, 3], 40_000, law, seed=seed, dtype=torch.bfloat16, scale=0.5, noise=3.0, uniforms=True
        )
        assert_same_bits("verify_chain", arguments, seed, f"seed {seed}, {law}")


@pytest.mark.parametrize("uniforms", [False, True])
@pytest.mark.parametrize("law", ["logits", "logits_and_logsumexp", "probs"])
def test_residuals_of_weighted_laws(law: str, uniforms: bool, seeds: Seeds) -> None:
    """Lenience, with laws so near each other that most attempts fail; with uniforms none is made."""
    for seed in seeds(40)[:4]:
        arguments = inputs.chain([2, 1, 3, 12], 9001, law, seed=seed, noise=0.02, uniforms=uniforms)
        arguments["rule"] = Lenience(0.98)
        # Below its share of the draft law, so that it is rejected.
        for r, end in enumerate(arguments["cu_num_draft_tokens"][1:].tolist()):
            arguments["target_logits"][end - 1 + r, arguments["draft_token_ids"][end - 1]] -= 8.0
        context = f"seed {seed}, {law}"
        assert_same_bits("verify_chain", arguments, seed, context)
        assert_same_bits("verify_chain", {**arguments, "return_logprobs": True, "top_k": 2000}, seed, context)


@pytest.mark.parametrize("uniforms", [False, True])
@pytest.mark.parametrize("law", ["logits", "logits_and_logsumexp", "probs"])
def test_block_verification_with_a_pass_over_the_rows(law: str, uniforms: bool, seeds: Seeds) -> None:
    """Laws so near each other that most attempts fail; with uniforms none is made."""
    for seed in seeds(40)[:4]:
        arguments = random_chains.near_laws(law, seed, noise=0.6 if uniforms else 0.03, uniforms=uniforms)
        arguments["rule"] = "block"
        assert_same_bits("verify_chain", arguments, seed, f"seed {seed}, {law}")
        assert_same_bits("verify_chain", {**arguments, "top_k": 30}, seed, f"seed {seed}, {law}, target cut")
        if law != "probs":
            # Not the drafts themselves: they would have no law.
            rows = arguments["draft_logits"]
            drafts = rows.gather(1, arguments["draft_token_ids"][:, None].long()).flatten()
            arguments["draft_thresholds"] = drafts.minimum(rows.quantile(0.95, dim=1))
            assert_same_bits("verify_chain", arguments, seed, f"seed {seed}, {law}, drafts cut")


def test_sample_has_the_bits_of_the_cpu(seeds: Seeds) -> None:
    for seed in seeds(30):
        arguments, context = random_chains.for_sample(seed, VOCAB_SIZES)
        assert_same_bits("sample", arguments, seed, context)


def test_sample_with_filters_has_the_bits_of_the_cpu(seeds: Seeds) -> None:
    for seed in seeds(60):
        arguments, context = random_chains.for_sample(seed, VOCAB_SIZES, filters=True)
        assert_same_bits("sample", arguments, seed, context)


@pytest.mark.parametrize("filters", [False, True])
def test_sample_of_the_most_likely_ids_has_the_bits_of_the_cpu(filters: bool, seeds: Seeds) -> None:
    for seed in seeds(60):
        arguments, context = random_chains.for_sample(seed, VOCAB_SIZES, filters=filters, law=True)
        assert_same_bits("sample", arguments, seed, context)


def test_uniforms_past_every_sum_choose_the_last_id_with_a_probability(seeds: Seeds) -> None:
    for _ in seeds(10):
        logits = torch.tensor([[-3000.0, 0.0, -1.0]])
        out = EMULATED.sample(logits, uniforms=torch.ones(1), law_size=3)
        assert out.token_ids.tolist() == [2] and out.support_ids.tolist() == [[1, 2, 0]]


@pytest.mark.parametrize("law", [False, True])
def test_thresholds_among_more_ids_than_are_gathered_at_once(law: bool, seeds: Seeds) -> None:
    for seed in seeds(40)[:4]:
        arguments, context = random_chains.for_sample(seed, (20_000, 40_000), filters=True, law=law)
        assert_same_bits("sample", arguments, seed, context)


@pytest.mark.parametrize("filters", [False, True])
def test_sample_recovered_has_the_bits_of_the_cpu(filters: bool, seeds: Seeds) -> None:
    for seed in seeds(30):
        arguments, context = random_chains.for_sample_recovered(seed, VOCAB_SIZES, filters=filters)
        assert_same_bits("sample_recovered", arguments, seed, context)


def test_plan_verification_has_the_bits_of_the_cpu(seeds: Seeds) -> None:
    for seed in seeds(60):
        choice = random.Random(seed)
        counts = [choice.choice((0, 1, 2, 5)) for _ in range(choice.choice((1, 7, 40, 150)))]
        probs = torch.tensor([choice.choice((0.0, 0.5, 1.0, choice.random())) for _ in range(sum(counts))])
        arguments: inputs.Arguments = {
            "accept_probs": probs,
            "cu_num_draft_tokens": torch.tensor([0, *counts]).cumsum(0),
            "budget": choice.choice((0, 3, 20, torch.tensor(10))),
        }
        if choice.random() < 0.6:
            arguments["step_costs"] = torch.rand(len(counts) + choice.choice((1, 9, 300))).mul(0.1).add(1)
        assert_same_bits("plan_verification", arguments, seed, f"seed {seed}")


def test_totals_of_any_value_lead_nowhere_in_a_plan(seeds: Seeds) -> None:
    for seed in seeds(20):
        choice = random.Random(seed)
        numbers = (0, 1, 3, 7, 20, -1, 2**40, -(2**63))
        EMULATED.plan_verification(
            torch.rand(7),
            torch.tensor([choice.choice(numbers) for _ in range(6)]),
            budget=torch.tensor(choice.choice(numbers)),
            step_costs=torch.ones(30),
        )


def test_row_statistics_has_the_bits_of_the_cpu(seeds: Seeds) -> None:
    for seed in seeds(60):
        arguments = test_row_statistics.random_arguments(seed)
        assert_same_bits("row_statistics", arguments, seed, f"seed {seed}")


def test_row_indices_of_any_value_are_no_rows() -> None:
    logits, indices = torch.zeros(2, 300), torch.tensor([2, -7, 2**40, 1])
    out = EMULATED.row_statistics(logits, draft_logits=torch.zeros(4, 300), row_indices=indices)
    assert out.entropy.isnan().tolist() == out.accept_prob.isnan().tolist() == [True, True, True, False]


def test_token_logprobs_has_the_bits_of_the_cpu(seeds: Seeds) -> None:
    for seed in seeds(60):
        arguments = test_token_logprobs.random_arguments(seed)
        assert_same_bits("token_logprobs", arguments, seed, f"seed {seed}")


def test_totals_of_any_value_lead_nowhere_in_emitted_rows(seeds: Seeds) -> None:
    for seed in seeds(20):
        choice = random.Random(seed)
        numbers = (0, 1, 3, 7, 20, -1, 2**40, -(2**63))
        EMULATED.token_logprobs(
            torch.randn(9, 300),
            torch.zeros(5, 4, dtype=torch.int64),
            top_n=2,
            cu_num_draft_tokens=torch.tensor([choice.choice(numbers) for _ in range(6)]),
        )


def test_expand_draft_logits_has_the_bits_of_the_cpu(seeds: Seeds) -> None:
    for seed in seeds(40):
        here, there = (test_draft_vocabulary.random_arguments(seed) for _ in range(2))
        specdec_ops.expand_draft_logits_(**here)
        EMULATED.expand_draft_logits_(**there)
        assert margins.same_bits(here["expanded"], there["expanded"]), seed


def test_draft_ids_that_lead_nowhere_are_left_out() -> None:
    d2t = torch.tensor([1, 5, -1, 2**40, -(2**63)])
    rows = EMULATED.expand_draft_logits(torch.zeros(1, 5), d2t, 3)
    assert rows.tolist() == [[-random_chains.INF, 0.0, -random_chains.INF]]


def test_logit_processors_have_the_bits_of_the_cpu(seeds: Seeds) -> None:
    for seed in seeds(60):
        here, there = (test_logit_processors.random_arguments(seed) for _ in range(2))
        specdec_ops.apply_logit_processors_(**here)
        EMULATED.apply_logit_processors_(**there)
        assert margins.same_bits(here["logits"], there["logits"]), seed


def test_totals_and_lengths_of_any_value_lead_nowhere_in_logit_processors(seeds: Seeds) -> None:
    for seed in seeds(40):
        choice = random.Random(seed)
        numbers = (0, 1, 3, 7, 20, -1, 2**40, -(2**62))
        arguments = test_logit_processors.random_arguments(seed)
        for name in ("cu_num_draft_tokens", "prompt_lens", "output_lens", "min_tokens"):
            if name in arguments:
                arguments[name] = torch.tensor([choice.choice(numbers) for _ in arguments[name]])
        # Rows in the middle of a buffer, beside which nothing may change.
        buffer = torch.full((len(arguments["logits"]) + 40, 400), 7.0)
        rows, columns = arguments["logits"].shape
        arguments["logits"] = buffer[20 : 20 + rows, 50 : 50 + columns]
        EMULATED.apply_logit_processors_(**arguments)
        buffer[20 : 20 + rows, 50 : 50 + columns] = 7.0
        assert buffer.eq(7.0).all(), seed
