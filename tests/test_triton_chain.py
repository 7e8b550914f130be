"""The chain ops in Triton on small shapes: the native kernels' tokens, where no GPU is."""

from __future__ import annotations

from typing import Any

import inputs
import pytest
import specdec_ops
import torch
from implementations import Implementation
from random_chains import EXTRAS

NAN, INF = float("nan"), float("inf")


def check(here: Any, there: Any) -> None:
    """Equal integers, and floats that agree to the digits that sums in another order leave."""
    for name, a, b in zip(there._fields, here, there, strict=True):
        if b is None or not b.is_floating_point():
            assert (a is None) == (b is None) and (b is None or torch.equal(a, b)), (name, a, b)
            continue
        bound = 1e-13 if b.dtype == torch.float64 else 2e-7
        torch.testing.assert_close(a, b, rtol=bound, atol=bound, equal_nan=True, msg=f"{name}: {a}, {b}")


@pytest.mark.parametrize("uniforms", [False, True], ids=["seeds", "uniforms"])
@pytest.mark.parametrize("law", inputs.DRAFT_LAWS)
def test_verify_chain_gives_the_native_tokens(triton: Implementation, law: str, uniforms: bool) -> None:
    for seed, vocab_size in enumerate((5, 130, 4_300)):
        arguments = inputs.chain([2, 0], vocab_size, law, seed=seed, noise=3.0, uniforms=uniforms)
        check(triton.verify_chain(**arguments), specdec_ops.verify_chain(**arguments))


@pytest.mark.parametrize("law", ["one_hot", "logits"])
def test_laws_are_those_of_the_definition(triton: Implementation, law: str) -> None:
    arguments = inputs.chain([3], 300, law, seed=7, dtype=torch.bfloat16)
    check(triton.verify_chain(**arguments, **EXTRAS), specdec_ops.verify_chain(**arguments, **EXTRAS))


def test_rows_that_are_no_laws(triton: Implementation) -> None:
    arguments = inputs.chain([1, 1, 1, 1], 70, "logits", seed=3)
    target, draft = arguments["target_logits"], arguments["draft_logits"]
    target[0], target[2, 66], target[4, 69] = -INF, NAN, INF
    draft[3] = NAN
    check(triton.verify_chain(**arguments, **EXTRAS), specdec_ops.verify_chain(**arguments, **EXTRAS))


def test_greedy_requests_and_ids_that_are_none(triton: Implementation) -> None:
    arguments = inputs.chain([2, 2, 1], 4_200, "logits", seed=1)
    arguments["temperature"][0] = 0.0
    arguments["draft_token_ids"][0] = arguments["target_logits"][0].argmax()
    arguments["draft_token_ids"][3], arguments["draft_token_ids"][4] = -1, 4_200
    check(triton.verify_chain(**arguments), specdec_ops.verify_chain(**arguments))


@pytest.mark.parametrize("law", ["logits", "probs"])
def test_recovered_tokens_are_what_the_residual_keeps(triton: Implementation, law: str) -> None:
    # Half of all attempts fail, or more: the first that is kept counts.
    arguments = inputs.chain([1] * 8, 40, law, seed=4, temperature=0.7, noise=0.8)
    rows = arguments["target_logits"][::2]
    rest = {
        name: value
        for name, value in arguments.items()
        if name not in ("target_logits", "cu_num_draft_tokens", "max_num_draft_tokens")
    }
    there = specdec_ops.sample_recovered(rows, **rest)
    own = {name: rest[name] for name in ("temperature", "seeds", "positions")}
    assert not torch.equal(there.token_ids, specdec_ops.sample(rows, **own).token_ids)
    check(triton.sample_recovered(rows, **rest), there)


def test_recovered_tokens_where_nothing_is_left_of_the_residual(triton: Implementation) -> None:
    # Every attempt fails, and so does the pass over both rows.
    arguments = inputs.chain([1, 1], 90, "logits", seed=5, temperature=0.7)
    rows = arguments["target_logits"][[0, 2]]
    rest = {name: arguments[name] for name in ("draft_token_ids", "temperature", "seeds", "positions")}
    check(
        triton.sample_recovered(rows, draft_logits=rows.clone(), **rest),
        specdec_ops.sample_recovered(rows, draft_logits=rows.clone(), **rest),
    )


def test_the_draft_is_not_drawn_again_whatever_its_weight(triton: Implementation) -> None:
    # Nearly all weight is in the chunk of the draft, and all but 3e-7 of it is the draft's.
    logits = torch.full((8, 200), -4.0)
    logits[:, 70], logits[:, 100] = 15.0, 0.0
    arguments = {
        "temperature": torch.ones(8),
        "seeds": torch.arange(8),
        "positions": torch.arange(8),
        "draft_token_ids": torch.full((8,), 70),
    }
    here = triton.sample_recovered(logits, **arguments)
    assert 70 not in here.token_ids.tolist()
    check(here, specdec_ops.sample_recovered(logits, **arguments))


@pytest.mark.parametrize("uniforms", [False, True], ids=["seeds", "uniforms"])
def test_sample_gives_the_native_tokens(triton: Implementation, uniforms: bool) -> None:
    logits = 3 * torch.randn(3, 4_300, generator=inputs.generator(2))
    arguments: dict[str, Any] = {"temperature": torch.tensor([1.0, 0.0, 0.4])}
    if uniforms:
        arguments["uniforms"] = torch.tensor([0.0, 0.3, 0.999], dtype=torch.float64)
    else:
        arguments.update(seeds=torch.arange(3), positions=torch.arange(3), draft_slot=2)
    check(triton.sample(logits, **arguments), specdec_ops.sample(logits, **arguments))
