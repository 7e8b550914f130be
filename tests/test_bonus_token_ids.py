"""verify_chain with bonus tokens that the caller has drawn."""

from __future__ import annotations

import math

import inputs
import margins
import pytest
import torch
from implementations import Implementation
from specdec_ops import Status
from specdec_ops.ops import verify_chain
from torch._subclasses import FakeTensorMode

EXTRAS = {"return_logsumexp": True, "return_logprobs": True, "return_accept_probs": True}


def mixed_chain(draft_law: str, *, seed: int = 1, id_dtype: torch.dtype = torch.int64) -> inputs.Arguments:
    """Greedy and sampled requests, some without drafts, drafts near the target's law."""
    counts = [3, 0, 1, 4, 2, 0, 3, 1, 2, 2] * 3
    temperature = torch.tensor([0.0, 0.7, 1.0] * 10)
    return inputs.chain(
        counts,
        300,
        draft_law,
        seed=seed,
        noise=0.3,
        scale=6.0,
        id_dtype=id_dtype,
        temperature=temperature,
        draft_temperature=torch.ones(30),
    )


@pytest.mark.parametrize("draft_law", inputs.DRAFT_LAWS)
def test_the_rest_is_as_with_bonus_rows(implementation: Implementation, draft_law: str) -> None:
    """Given the ids that bonus rows lead to, nothing changes but what is said of those rows."""
    arguments = mixed_chain(draft_law)
    plain = implementation.verify_chain(**arguments, **EXTRAS)
    counts = arguments["cu_num_draft_tokens"].diff()
    all_accepted = plain.num_accepted == counts
    assert all_accepted[counts > 0].any() and not all_accepted.all()
    drawn = plain.token_ids.gather(1, plain.num_accepted[:, None].long()).squeeze(1)
    # An id that no row leads to must show up where it is due, and only there.
    given = torch.where(all_accepted, drawn, (drawn + 1) % 300)
    out = implementation.verify_chain(**inputs.without_bonus_rows(arguments, given), **EXTRAS)
    for name in ("token_ids", "num_accepted", "status", "accept_probs"):
        assert margins.same_bits(getattr(out, name), getattr(plain, name)), name
    is_draft_row = torch.ones(arguments["target_logits"].shape[0], dtype=torch.bool)
    is_draft_row[inputs.bonus_rows(arguments)] = False
    assert margins.same_bits(out.logsumexp, plain.logsumexp[is_draft_row])
    logprobs = plain.logprobs.clone()
    logprobs[all_accepted, plain.num_accepted[all_accepted].long()] = math.nan
    assert margins.same_bits(out.logprobs, logprobs)

    changed = implementation.verify_chain(**inputs.without_bonus_rows(arguments, (given + 7) % 300))
    expected = plain.token_ids.clone()
    expected[all_accepted, plain.num_accepted[all_accepted].long()] = (given[all_accepted] + 7) % 300
    assert torch.equal(changed.token_ids, expected)


@pytest.mark.parametrize("draft_law", inputs.DRAFT_LAWS)
def test_matches_reference(native: Implementation, draft_law: str) -> None:
    arguments = inputs.without_bonus_rows(mixed_chain(draft_law, seed=2), torch.arange(30))
    margins.assert_chain_matches(native.verify_chain(**arguments, **EXTRAS), arguments)


@pytest.mark.parametrize("bonus_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64], ids=str)
def test_ids_of_either_dtype_and_any_stride(
    implementation: Implementation, id_dtype: torch.dtype, bonus_dtype: torch.dtype
) -> None:
    arguments = mixed_chain("one_hot", id_dtype=id_dtype)
    given = torch.arange(30)
    expected = implementation.verify_chain(**inputs.without_bonus_rows(arguments, given))
    column = torch.stack([given + 90, given, given + 60], dim=1).to(bonus_dtype)[:, 1]
    assert column.stride() == (3,)
    out = implementation.verify_chain(**inputs.without_bonus_rows(arguments, column))
    assert out.token_ids.dtype == id_dtype
    assert margins.all_same_bits(out[:3], expected[:3])


def test_requests_without_drafts_emit_theirs_at_once(implementation: Implementation) -> None:
    for temperature in (0.0, 1.0):
        out = implementation.verify_chain(
            torch.zeros(0, 9),
            torch.zeros(0, dtype=torch.int32),
            torch.zeros(4, dtype=torch.int64),
            temperature=temperature,
            seeds=1,
            positions=torch.arange(3),
            bonus_token_ids=torch.tensor([8, 0, 3]),
            max_num_draft_tokens=1,
            **EXTRAS,
        )
        assert out.token_ids.tolist() == [[8, -1], [0, -1], [3, -1]]
        assert out.num_accepted.tolist() == [0, 0, 0]
        assert out.status.tolist() == [Status.OK] * 3
        assert out.logsumexp.shape == (0,) and out.logprobs.isnan().all()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad_id", [-1, -2, 5, 2**31 - 1, -(2**63), 2**63 - 1, 2**32 + 3])
def test_ids_outside_the_vocabulary_are_never_emitted(
    implementation: Implementation, bad_id: int, temperature: float
) -> None:
    """-1 stands for a request whose result is thrown away; any other such id is an upstream fault."""
    logits = torch.zeros(3, 6).scatter(1, torch.tensor([[2], [3], [1]]), 60.0)
    arguments = {
        "draft_token_ids": torch.tensor([2, 3, 4], dtype=torch.int32),
        "cu_num_draft_tokens": torch.tensor([0, 2, 3, 3]),
        "temperature": temperature,
        "accept_uniforms": torch.full((3,), 0.5),
        "recovered_uniforms": torch.full((3,), 0.5),
        "vocab_size": 5,
    }
    out = implementation.verify_chain(logits, **arguments, bonus_token_ids=torch.full((3,), bad_id), **EXTRAS)
    # The second request rejects its draft, so that its bonus token is not looked at.
    assert out.token_ids.tolist() == [[2, 3, -1], [1, -1, -1], [-1, -1, -1]]
    assert out.num_accepted.tolist() == [2, 0, 0]
    fault = Status.OK if bad_id == -1 else Status.INVALID_DRAFT_ID
    assert out.status.tolist() == [fault, Status.OK, fault]
    assert out.logprobs.isnan().tolist() == [[False, False, True], [False, True, True], [True] * 3]


def test_no_requests(implementation: Implementation) -> None:
    out = implementation.verify_chain(
        torch.zeros(0, 4),
        torch.zeros(0, dtype=torch.int64),
        torch.tensor([0]),
        bonus_token_ids=torch.zeros(0, dtype=torch.int64),
    )
    assert out.token_ids.shape == (0, 1)


def test_shapes_are_known_without_running() -> None:
    arguments = inputs.without_bonus_rows(mixed_chain("one_hot"), torch.arange(30))
    with FakeTensorMode() as mode:
        fake = {
            name: mode.from_tensor(value) if isinstance(value, torch.Tensor) else value
            for name, value in arguments.items()
        }
        shapes = verify_chain.verify_chain(**fake, max_num_draft_tokens=4, **EXTRAS)
    real = verify_chain.verify_chain(**arguments, **EXTRAS)
    for name, value in real._asdict().items():
        assert (getattr(shapes, name).shape, getattr(shapes, name).dtype) == (value.shape, value.dtype), name


def test_opcheck() -> None:
    arguments = inputs.without_bonus_rows(inputs.chain([2, 0, 3], 70, "logits"), torch.tensor([1, 2, 3]))
    names = ("target_logits", "draft_token_ids", "cu_num_draft_tokens", "temperature")
    args = (*(arguments.pop(name) for name in names), 3)
    torch.library.opcheck(verify_chain._op, args, arguments)
