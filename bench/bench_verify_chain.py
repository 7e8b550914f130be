"""verify_chain: one step of speculative decoding, from logits and drafts to tokens."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import _eager
import _vllm
import pytest
import specdec_ops
import torch
from _cases import ACCEPTANCE, VERIFY_CHAIN, Case, Inputs
from _suite import OURS, Calls, Suite
from specdec_ops._reference import Stream, uniform
from specdec_ops.ops.verify_chain import _reference_verify_chain
from torch import Tensor


def specdec(inputs: Inputs) -> Callable[..., specdec_ops.VerifyChainOutput]:
    return functools.partial(
        specdec_ops.verify_chain,
        inputs.target_logits,
        inputs.draft_token_ids,
        inputs.cu_num_draft_tokens,
        max_num_draft_tokens=inputs.case.num_drafts,
        **_laws(inputs),
    )


def block(inputs: Inputs) -> Callable[[], Tensor]:
    """The same op by block verification, which accepts more drafts and reads more rows."""
    call = functools.partial(specdec(inputs), rule="block")
    return lambda: call().token_ids


def _laws(inputs: Inputs) -> dict[str, Any]:
    return {
        "temperature": inputs.temperature,
        "draft_logits": inputs.draft_logits,
        "draft_logsumexp": inputs.draft_logsumexp,
        "seeds": inputs.seeds,
        "positions": inputs.positions,
    }


def must_read(inputs: Inputs) -> list[Tensor]:
    """Target rows up to the deciding one, and the draft rows that those decisions need.

    A draft row is needed for its logsumexp, unless that is given or the coin is below p, where no q rejects.
    A recovered token needs no row of its own.
    """
    k = inputs.case.num_drafts
    output = specdec(inputs)(return_logprobs=True)
    assert output.logprobs is not None
    rows = []
    for request, accepted in enumerate(output.num_accepted.tolist()):
        first_target, first_draft = request * (k + 1), request * k
        rows += list(inputs.target_logits[first_target : first_target + accepted + 1])
        if inputs.draft_logits is None:
            continue
        for slot in range(min(accepted + 1, k)):
            p = math.exp(output.logprobs[request, slot])
            coin = uniform(int(inputs.seeds[request]), Stream.ACCEPT, slot, int(inputs.positions[request]))
            if inputs.draft_logsumexp is None and (slot == accepted or coin >= p):
                rows.append(inputs.draft_logits[first_draft + slot])
    return rows


def check(sets: Sequence[Inputs], calls: Calls) -> Mapping[str, float]:
    """Tokens are those of the float64 reference, valid, and accepted as often as the laws say."""
    case = sets[0].case
    facts = {}
    for name, of_sets in calls.items():
        outputs = [call() for call in of_sets]
        tokens = [output.token_ids if name == OURS else output for output in outputs]
        facts[name] = _acceptance(tokens, case)
        if case.greedy:
            for theirs, ours in zip(tokens, calls[OURS], strict=True):
                assert torch.equal(theirs.long(), ours().token_ids.long()), name
        elif name not in ("vllm-step", "block"):
            judged = case.batch * len(sets)
            assert abs(facts[name] - ACCEPTANCE) < 6 * math.sqrt(ACCEPTANCE * (1 - ACCEPTANCE) / judged), name
    for inputs, call in zip(sets, calls[OURS], strict=True):
        _check_output(inputs, call())
    _check_reference(sets[0])
    return facts


def _acceptance(tokens: Sequence[Tensor], case: Case) -> float:
    """Accepted drafts over judged drafts."""
    accepted = torch.cat([(ids >= 0).sum(dim=1) - 1 for ids in tokens]).clamp(min=0)
    judged = (accepted + 1).clamp(max=case.num_drafts)
    return float(accepted.sum() / judged.sum())


def _check_output(inputs: Inputs, output: specdec_ops.VerifyChainOutput) -> None:
    case = inputs.case
    assert (output.status == specdec_ops.Status.OK).all()
    slots = torch.arange(case.num_drafts + 1)
    accepted = output.num_accepted.unsqueeze(1)
    drafts = inputs.draft_token_ids.view(case.batch, -1)
    assert ((output.token_ids[:, :-1] == drafts) | (slots[:-1] >= accepted)).all()
    assert ((output.token_ids == -1) == (slots > accepted)).all()
    assert (output.token_ids < case.vocab_size).all()


def _check_reference(inputs: Inputs) -> None:
    """The first request's tokens are those of the float64 reference."""
    k = inputs.case.num_drafts
    laws: dict[str, Any] = {}
    for name, value in _laws(inputs).items():
        laws[name] = None if value is None else value[: k if name.startswith("draft") else 1]
    temperature = laws.pop("temperature")
    expected = _reference_verify_chain(
        inputs.target_logits[: k + 1],
        inputs.draft_token_ids[:k],
        torch.tensor([0, k]),
        temperature,
        k,
        **laws,
    )
    assert torch.equal(specdec(inputs)().token_ids[:1], expected[0])


SUITE = Suite(
    name="verify_chain",
    cases=VERIFY_CHAIN,
    implementations={
        OURS: specdec,
        "block": block,
        "eager": _eager.verify_chain,
        "vllm": _vllm.rejection_sample,
        "vllm-step": _vllm.step,
        "vllm-argmax": _vllm.greedy_argmax,
    },
    check=check,
    must_read=must_read,
)


@pytest.mark.parametrize(("case", "implementation"), SUITE.parameters(), ids=str)
def test_verify_chain(
    case: Case, implementation: str, side_by_side: Callable[[Suite, Case, str], None]
) -> None:
    side_by_side(SUITE, case, implementation)
