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
    for seed in seeds(100):
        arguments, flags, context = random_chains.random_chain(seed, vocab_sizes=VOCAB_SIZES)
        assert_same_bits("verify_chain", {**arguments, **flags}, seed, context)


@pytest.mark.parametrize("option", random_chains.OPTIONS)
def test_options_of_verify_chain_have_the_bits_of_the_cpu(option: str, seeds: Seeds) -> None:
    for seed in seeds(20):
        arguments, flags, context = random_chains.random_chain_with(option, seed, VOCAB_SIZES)
        assert_same_bits("verify_chain", {**arguments, **flags}, seed, context)


def test_sample_has_the_bits_of_the_cpu(seeds: Seeds) -> None:
    for seed in seeds(30):
        arguments, context = random_chains.for_sample(seed, VOCAB_SIZES)
        assert_same_bits("sample", arguments, seed, context)


def test_sample_recovered_has_the_bits_of_the_cpu(seeds: Seeds) -> None:
    for seed in seeds(30):
        arguments, context = random_chains.for_sample_recovered(seed, VOCAB_SIZES)
        assert_same_bits("sample_recovered", arguments, seed, context)
