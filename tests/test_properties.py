"""Drawn shapes, dtypes, strides, ties and non-finite values, against the float64 reference."""

from __future__ import annotations

from typing import Any

import inputs
import margins
import torch
from hypothesis import given
from hypothesis import strategies as st
from implementations import REFERENCE, Implementation
from specdec_ops import Status
from torch import Tensor

EXTRAS = {"return_logsumexp": True, "return_logprobs": True, "return_accept_probs": True}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SPECIAL = [float("nan"), float("inf"), -float("inf"), 60_000.0, -60_000.0, 0.0, -0.0, 1e-40]
#: Of how many drawn examples one may hang on a draw within rounding of its threshold.
MAX_NEAR = 1


@st.composite
def chains(draw: st.DrawFn) -> inputs.Arguments:
    counts = draw(st.lists(st.integers(0, 5), min_size=1, max_size=4))
    vocab_size = draw(st.one_of(st.integers(1, 40), st.sampled_from([255, 256, 257, 4097])))
    draft_law = draw(st.sampled_from(inputs.DRAFT_LAWS))
    batch, num_drafts = len(counts), sum(counts)
    temperatures = st.sampled_from([0.0, 1e-6, 0.2, 0.7, 1.0, 1.5, 5.0])
    arguments = inputs.chain(
        counts,
        vocab_size,
        draft_law,
        seed=draw(st.integers(0, 2**32 - 1)),
        dtype=draw(st.sampled_from(DTYPES)),
        id_dtype=draw(st.sampled_from([torch.int32, torch.int64])),
        scale=draw(st.sampled_from([0.0, 0.5, 3.0, 12.0])),
        noise=draw(st.sampled_from([0.0, 0.1, 1.0])),
        temperature=torch.tensor(draw(st.lists(temperatures, min_size=batch, max_size=batch))),
        draft_temperature=draw(st.none() | temperatures.filter(bool)),
        support=draw(st.integers(1, 9)),
        uniforms=draw(st.booleans()),
    )
    if draw(st.booleans()):
        for name in ("target_logits", "draft_logits"):
            if name in arguments and draft_law != "logits_and_logsumexp":
                arguments[name] = (arguments[name] * 2).round() / 2
    if draw(st.booleans()):
        arguments["has_draft_law"] = torch.tensor(
            draw(st.lists(st.booleans(), min_size=batch, max_size=batch))
        )
    for _ in range(draw(st.integers(0, 3))):
        rows = arguments["target_logits"]
        row = draw(st.integers(0, rows.shape[0] - 1))
        rows[row, draw(st.integers(0, vocab_size - 1))] = draw(st.sampled_from(SPECIAL))
    if draw(st.integers(0, 5)) == 0:
        arguments["target_logits"][draw(st.integers(0, batch - 1))] = -torch.inf
    if num_drafts:
        for _ in range(draw(st.integers(0, 2))):
            bad_ids = st.sampled_from([-1, -2, vocab_size, vocab_size + 7, 2**31 - 1, -(2**31), 0])
            arguments["draft_token_ids"][draw(st.integers(0, num_drafts - 1))] = draw(bad_ids)
        if draft_law in ("logits", "probs") and draw(st.booleans()):
            name = f"draft_{draft_law}"
            value = draw(st.sampled_from(SPECIAL[:3] if draft_law == "logits" else SPECIAL[:2]))
            arguments[name][draw(st.integers(0, num_drafts - 1)), draw(st.integers(0, vocab_size - 1))] = (
                value
            )
    if draw(st.booleans()):
        gap, offset = draw(st.integers(0, 9)), draw(st.integers(0, 5))
        for name in ("target_logits", "draft_logits", "draft_probs"):
            if name in arguments and arguments[name].shape[0]:
                arguments[name] = inputs.strided(arguments[name], gap, offset, fill=float("nan"))
    if draw(st.booleans()):
        for name in ("target_logits", "draft_logits", "draft_probs"):
            if name in arguments:
                padding = torch.full((arguments[name].shape[0], 3), draw(st.sampled_from(SPECIAL[:4]))).to(
                    arguments[name].dtype
                )
                arguments[name] = torch.cat([arguments[name], padding], dim=1)
        arguments["vocab_size"] = vocab_size
    return arguments


def assert_well_formed(out: Any, arguments: inputs.Arguments) -> None:
    """What holds of every result: ids in range, then -1; counts within the drafts; a known status."""
    size = arguments.get("vocab_size") or arguments["target_logits"].shape[1]
    counts = arguments["cu_num_draft_tokens"].diff()
    assert ((out.num_accepted >= 0) & (out.num_accepted <= counts)).all()
    emitted = torch.arange(out.token_ids.shape[1]) <= out.num_accepted[:, None]
    assert ((out.token_ids[emitted] >= 0) & (out.token_ids[emitted] < size)).all()
    assert (out.token_ids[~emitted] == -1).all()
    assert set(out.status.tolist()) <= {int(status) for status in Status}


@given(chains())
def test_verify_chain_matches_reference(native: Implementation, arguments: inputs.Arguments) -> None:
    before = {name: value.clone() for name, value in arguments.items() if isinstance(value, Tensor)}
    out = native.verify_chain(**arguments, **EXTRAS)
    assert_well_formed(out, arguments)
    margins.assert_chain_matches(out, arguments, max_near=MAX_NEAR)
    for name, value in before.items():
        assert margins.same_bits(arguments[name], value), name


@given(chains())
def test_the_reference_is_well_formed(arguments: inputs.Arguments) -> None:
    assert_well_formed(REFERENCE.verify_chain(**arguments), arguments)


@given(chains(), st.none() | st.integers(0, 5), st.sampled_from([torch.int32, torch.int64]))
def test_sample_matches_reference(
    native: Implementation, chain: inputs.Arguments, draft_slot: int | None, token_dtype: torch.dtype
) -> None:
    logits = chain["target_logits"]
    batch = logits.shape[0]
    arguments = {
        "logits": logits,
        "temperature": chain["temperature"].repeat(batch)[:batch],
        "seeds": torch.arange(batch) - 2**62,
        "positions": torch.arange(batch) * 2**33,
        "draft_slot": draft_slot,
        "vocab_size": chain.get("vocab_size"),
        "token_dtype": token_dtype,
    }
    margins.assert_sample_matches(native.sample(**arguments), arguments, max_near=MAX_NEAR)


@given(chains())
def test_sample_recovered_matches_reference(native: Implementation, chain: inputs.Arguments) -> None:
    num_drafts = chain["draft_token_ids"].shape[0]
    requests = chain["cu_num_draft_tokens"].diff()
    arguments = {
        name: value
        for name, value in chain.items()
        if name not in ("cu_num_draft_tokens", "seeds", "positions", "accept_uniforms", "recovered_uniforms")
    }
    arguments["target_logits"] = chain["target_logits"][:num_drafts]
    for name in ("temperature", "draft_temperature", "has_draft_law"):
        if isinstance(arguments.get(name), Tensor):
            arguments[name] = arguments[name].repeat_interleave(requests.long())
    arguments["seeds"], arguments["positions"] = torch.arange(num_drafts), torch.arange(num_drafts)
    out = native.sample_recovered(**arguments)
    size = chain.get("vocab_size") or chain["target_logits"].shape[1]
    assert ((out.token_ids >= 0) & (out.token_ids < size)).all()
    # Where drafter and target agree but for rounding, all that is left of p - q is rounding.
    margins.assert_recovered_matches(out, arguments, max_near=num_drafts)
