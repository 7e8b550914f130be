"""The same bits, whatever surrounds a request, however it lies in memory, on every tier and thread count."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import implementations
import inputs
import margins
import pytest
import torch
from implementations import Implementation
from torch import Tensor

EXTRAS = {"return_logsumexp": True, "return_logprobs": True, "return_accept_probs": True}
SIZES = [17, 4097, 20_000]


def mixed(draft_law: str, vocab_size: int, seed: int, dtype: torch.dtype = torch.float32) -> inputs.Arguments:
    counts = [3, 0, 2, 5, 1, 4]
    temperature = torch.tensor([0.7, 1.0, 0.0, 1.2, 0.9, 0.5])
    return inputs.chain(
        counts,
        vocab_size,
        draft_law,
        seed=seed,
        dtype=dtype,
        temperature=temperature,
        draft_temperature=torch.ones(6),
    )


def copies(arguments: inputs.Arguments) -> inputs.Arguments:
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in arguments.items()}


def assert_unchanged(arguments: inputs.Arguments, before: inputs.Arguments) -> None:
    for name, value in arguments.items():
        if isinstance(value, Tensor):
            assert margins.same_bits(value, before[name]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("vocab_size", SIZES)
@pytest.mark.parametrize("draft_law", inputs.DRAFT_LAWS)
def test_every_tier_gives_the_same_bits(draft_law: str, vocab_size: int, dtype: torch.dtype) -> None:
    arguments = mixed(draft_law, vocab_size, 1, dtype)
    results = []
    for name in implementations.native_names():
        with implementations.use(name) as ops:
            verified = ops.verify_chain(**arguments, **EXTRAS)
            sampled = ops.sample(
                arguments["target_logits"], temperature=0.8, seeds=3, positions=torch.arange(21)
            )
            results.append((*verified, *sampled))
    assert all(margins.all_same_bits(result, results[0]) for result in results)


def test_every_tier_gives_the_same_bits_over_many_requests() -> None:
    arguments = inputs.chain([r % 5 for r in range(3000)], 100, "logits", seed=2)
    results = []
    for name in implementations.native_names():
        with implementations.use(name) as ops:
            results.append(ops.verify_chain(**arguments, **EXTRAS))
    assert all(margins.all_same_bits(result, results[0]) for result in results)


@pytest.mark.parametrize("draft_law", inputs.DRAFT_LAWS)
@pytest.mark.parametrize("vocab_size", SIZES)
def test_threads_do_not_change_a_bit(
    native: Implementation, num_threads: None, draft_law: str, vocab_size: int
) -> None:
    for arguments in (mixed(draft_law, vocab_size, 3), inputs.chain([3], vocab_size, draft_law, seed=4)):
        results = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results += [native.verify_chain(**arguments, **EXTRAS) for _ in range(3)]
        assert all(margins.all_same_bits(result, results[0]) for result in results)


def test_repeated_runs_agree(default_native: Implementation) -> None:
    """A32: a hundred runs on both cores, large vocabulary."""
    arguments = inputs.chain([3, 2], 50_000, "logits", seed=5)
    first = default_native.verify_chain(**arguments, **EXTRAS)
    for _ in range(100):
        assert margins.all_same_bits(default_native.verify_chain(**arguments, **EXTRAS), first)


@pytest.mark.parametrize("draft_law", inputs.DRAFT_LAWS)
def test_order_and_neighbours_do_not_matter(implementation: Implementation, draft_law: str) -> None:
    """C1, C3, C7, A25: any order, any company, rows taken by request."""
    arguments = mixed(draft_law, 60, 6)
    whole = implementation.verify_chain(**arguments, **EXTRAS)
    for order in ([5, 4, 3, 2, 1, 0], [3], [2, 0], [1, 1, 3, 3, 5]):
        part = implementation.verify_chain(
            **inputs.select_requests(arguments, order), **EXTRAS, max_num_draft_tokens=5
        )
        index = torch.tensor(order)
        assert margins.same_bits(part.token_ids, whole.token_ids[index])
        assert margins.same_bits(part.num_accepted, whole.num_accepted[index])
        assert margins.same_bits(part.status, whole.status[index])
        assert part.logprobs is not None and whole.logprobs is not None
        assert margins.same_bits(part.logprobs, whole.logprobs[index])


def test_padding_drafts_do_not_matter(implementation: Implementation) -> None:
    """D16: a request padded with -1 gives the tokens of the unpadded one."""
    short = inputs.chain([2], 60, "logits", seed=7)
    plain = implementation.verify_chain(**short, max_num_draft_tokens=6)
    padded = {
        **short,
        "target_logits": torch.cat([short["target_logits"], torch.full((4, 60), torch.nan)]),
        "draft_token_ids": torch.cat([short["draft_token_ids"], torch.full((4,), -1)]),
        "draft_logits": torch.cat([short["draft_logits"], torch.full((4, 60), torch.nan)]),
        "cu_num_draft_tokens": torch.tensor([0, 6]),
    }
    assert margins.all_same_bits(implementation.verify_chain(**padded)[:3], plain[:3])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("draft_law", inputs.DRAFT_LAWS)
@pytest.mark.parametrize("vocab_size", [33, 4097])
def test_strides_and_offsets_do_not_matter(
    native: Implementation, draft_law: str, vocab_size: int, dtype: torch.dtype
) -> None:
    """B4, B7, B8: views with gaps and offsets, filled with NaN and -7 around the rows, give the same bits."""
    arguments = mixed(draft_law, vocab_size, 8, dtype)
    expected = native.verify_chain(**arguments, **EXTRAS)
    views = dict(arguments)
    for name, value in arguments.items():
        if value.dim() == 2 and value.is_floating_point():
            if name == "draft_support_logprobs":
                views[name] = inputs.strided(value.t(), 1, 1, fill=float("nan")).t()
            else:
                views[name] = inputs.strided(value, 7, 3, fill=float("nan"))
        elif value.dim() == 2:
            views[name] = inputs.strided(value, 5, 2, fill=-7)
        else:
            gap = torch.full(
                (value.shape[0] + 1, 3), -7 if not value.is_floating_point() else torch.nan, dtype=value.dtype
            )
            gap[1:, 1] = value
            views[name] = gap[1:, 1]
    before = {name: value.clone() for name, value in views.items()}
    assert margins.all_same_bits(native.verify_chain(**views, **EXTRAS), expected)
    assert_unchanged(views, before)


def test_expanded_rows_equal_copies(implementation: Implementation) -> None:
    """B8: one row of logits with stride 0, one temperature for all."""
    row = torch.randn(1, 90, generator=inputs.generator(9))
    arguments: dict[str, Any] = {
        "draft_token_ids": torch.tensor([3]).expand(6),
        "cu_num_draft_tokens": torch.tensor([0, 2, 4, 6]),
        "seeds": torch.arange(3),
        "positions": torch.tensor([5]).expand(3),
    }
    expanded = implementation.verify_chain(
        row.expand(9, 90),
        temperature=torch.tensor([0.9]).expand(3),
        draft_logits=row.expand(6, 90),
        **arguments,
    )
    copied = implementation.verify_chain(
        row.repeat(9, 1), temperature=0.9, draft_logits=row.repeat(6, 1), **arguments
    )
    assert margins.all_same_bits(expanded, copied)


@pytest.mark.parametrize("draft_law", inputs.DRAFT_LAWS)
def test_integer_dtypes_give_the_same_tokens(implementation: Implementation, draft_law: str) -> None:
    """B6."""
    wide = mixed(draft_law, 60, 10)
    narrow = {
        name: value.int() if value.dtype == torch.int64 and name != "seeds" else value
        for name, value in wide.items()
    }
    narrow["positions"] = wide["positions"] = wide["positions"] % 1000
    narrow["positions"] = narrow["positions"].int()
    left, right = (
        implementation.verify_chain(**wide, **EXTRAS),
        implementation.verify_chain(**narrow, **EXTRAS),
    )
    assert (left.token_ids.dtype, right.token_ids.dtype) == (torch.int64, torch.int32)
    assert torch.equal(left.token_ids, right.token_ids.long())
    assert margins.all_same_bits(left[1:], right[1:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("vocab_size", SIZES)
def test_a_logsumexp_from_sample_changes_no_bit(
    native: Implementation, vocab_size: int, dtype: torch.dtype
) -> None:
    arguments = inputs.chain([3] * 30, vocab_size, "logits", seed=11, dtype=dtype, draft_temperature=0.8)
    logsumexp = native.sample(
        arguments["draft_logits"], temperature=0.8, seeds=0, positions=torch.arange(90), draft_slot=0
    ).logsumexp
    plain = native.verify_chain(**arguments, **EXTRAS)
    assert margins.all_same_bits(native.verify_chain(**arguments, draft_logsumexp=logsumexp, **EXTRAS), plain)
    assert margins.all_same_bits(native.verify_chain(**arguments, draft_logsumexp=logsumexp)[:3], plain[:3])
    first = plain.num_accepted == 0
    assert 0 < first.sum() < 30


@pytest.mark.parametrize("vocab_size", SIZES)
def test_no_drafts_equal_sample(native: Implementation, vocab_size: int) -> None:
    """C4, C10: a request without drafts gets the plain sampler's token, log-probability and logsumexp."""
    arguments = inputs.chain([0] * 12, vocab_size, "one_hot", seed=12)
    arguments["temperature"][3] = 0.0
    verified = native.verify_chain(**arguments, **EXTRAS)
    sampled = native.sample(
        arguments["target_logits"],
        temperature=arguments["temperature"],
        seeds=arguments["seeds"],
        positions=arguments["positions"],
    )
    assert margins.same_bits(verified.token_ids.squeeze(1), sampled.token_ids)
    assert verified.logprobs is not None
    assert margins.same_bits(verified.logprobs.squeeze(1), sampled.logprobs)
    assert margins.same_bits(verified.logsumexp, sampled.logsumexp)
    assert margins.same_bits(verified.status, sampled.status)


def test_the_bonus_token_equals_sample_at_its_position(native: Implementation) -> None:
    """C10: the draw at a position does not depend on how many drafts led there."""
    logits = torch.randn(1, 500, generator=inputs.generator(13))
    for k in (1, 2, 4):
        rows = torch.full((k + 1, 500), -torch.inf)
        rows[:, 7] = 0.0
        rows[k] = logits
        for position in (10, 2**33):
            out = native.verify_chain(
                rows,
                torch.full((k,), 7),
                torch.tensor([0, k]),
                seeds=5,
                positions=torch.tensor([position]),
            )
            expected = native.sample(logits, seeds=5, positions=torch.tensor([position + k])).token_ids
            assert out.token_ids[0, k] == expected


@pytest.mark.parametrize("draft_law", inputs.DRAFT_LAWS)
def test_inputs_are_not_written(implementation: Implementation, draft_law: str) -> None:
    """A7."""
    arguments = mixed(draft_law, 60, 14)
    before = copies(arguments)
    implementation.verify_chain(**arguments, **EXTRAS)
    assert_unchanged(arguments, before)
    recovered = {**arguments, "target_logits": arguments["target_logits"][:15]}
    del recovered["cu_num_draft_tokens"]
    for name in ("temperature", "draft_temperature", "seeds", "positions"):
        recovered[name] = recovered[name].repeat(3)[:15]
    before = copies(recovered)
    implementation.sample_recovered(**recovered)
    assert_unchanged(recovered, before)
    sampled = {
        "logits": recovered["target_logits"],
        **{name: recovered[name] for name in ("temperature", "seeds", "positions")},
    }
    before = copies(sampled)
    implementation.sample(**sampled)
    assert_unchanged(sampled, before)


def test_outputs_share_no_memory(implementation: Implementation) -> None:
    """C6: a second call leaves the first call's outputs alone."""
    first = implementation.verify_chain(**mixed("logits", 60, 15), **EXTRAS)
    kept = [value.clone() for value in first]
    implementation.verify_chain(**mixed("logits", 60, 16), **EXTRAS)
    assert margins.all_same_bits(first, kept)
    pointers = [value.data_ptr() for value in first]
    assert len(set(pointers)) == len(pointers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_offsets_beyond_two_to_the_31_elements(default_native: Implementation, dtype: torch.dtype) -> None:
    """A20: rows that start behind element 2^31, and one that straddles it."""
    width, stride = 3000, (1 << 30) + 1000 if dtype == torch.bfloat16 else (1 << 30) - 1000
    arguments = inputs.chain([2, 1], width, "logits", seed=17, dtype=dtype)
    expected = default_native.verify_chain(**arguments, **EXTRAS)
    far = dict(arguments)
    for name in ("target_logits", "draft_logits"):
        rows = arguments[name]
        buffer = torch.empty((rows.shape[0] - 1) * stride + width, dtype=dtype)
        far[name] = buffer.as_strided(rows.shape, (stride, 1))
        far[name].copy_(rows)
    assert margins.all_same_bits(default_native.verify_chain(**far, **EXTRAS), expected)
    sampled = default_native.sample(far["target_logits"], seeds=1, positions=torch.arange(5))
    assert margins.all_same_bits(
        sampled, default_native.sample(arguments["target_logits"], seeds=1, positions=torch.arange(5))
    )


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.parametrize("tier", implementations.available_tiers())
def test_the_environment_caps_the_tier(tier: str) -> None:
    """G6."""
    out = run_python(
        "import specdec_ops; from specdec_ops import _C; print(_C.cpu_isa())", SPECDEC_OPS_CPU_ISA=tier
    )
    assert out.stdout.strip() == tier, out.stderr


def test_unknown_tiers_are_refused() -> None:
    module = implementations.native_module()
    with pytest.raises(ValueError, match="name must be an available tier, got 'sse9'"):
        module.set_cpu_isa("sse9")


def test_the_package_can_be_imported_first_and_brings_no_thread_pool() -> None:
    """G7, G11."""
    code = (
        "import specdec_ops, torch\n"
        "specdec_ops.sample(torch.zeros(4, 9000), temperature=0.0)\n"
        "names = {line.split('/')[-1].strip() for line in open('/proc/self/maps') if '/' in line}\n"
        "print(sum('gomp' in name or 'iomp' in name or 'libomp' in name for name in names))"
    )
    out = run_python(code)
    assert out.stdout.strip() in ("0", "1"), out.stderr
