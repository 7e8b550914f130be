"""The bookkeeping ops on a GPU: what the CPU writes and nothing else, whatever the totals say."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import draft_batches
import pytest
import runner_batches
import specdec_ops
import test_advance_draft_step
import test_combine_sampled_and_draft_tokens
import test_compute_slot_mapping
import test_count_emitted_and_rejected
import test_expand_dflash_inputs
import test_expand_draft_inputs
import test_expand_request_indices
import test_expand_to_drafts
import test_gather_draft_tokens
import test_prepare_next_tokens
import test_prepare_padded_draft_inputs
import test_prepare_positions_and_seq_lens
import test_sample_recovered_probs
import test_update_num_computed_tokens
import test_update_request_state
import test_verify_argmax
import test_verify_probs
import torch
from torch import Tensor

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

DEVICE = "cuda"
#: Elements on either side of a tensor, in each dimension.
MARGIN = 33
GUARD = 77
#: What is known on the device alone.
TOTALS = ("cu_num_draft_tokens", "query_start_loc", "cu_num_logits")
MODULES = (
    test_advance_draft_step,
    test_combine_sampled_and_draft_tokens,
    test_compute_slot_mapping,
    test_count_emitted_and_rejected,
    test_expand_dflash_inputs,
    test_expand_draft_inputs,
    test_expand_request_indices,
    test_expand_to_drafts,
    test_gather_draft_tokens,
    test_prepare_next_tokens,
    test_prepare_padded_draft_inputs,
    test_prepare_positions_and_seq_lens,
    test_sample_recovered_probs,
    test_update_num_computed_tokens,
    test_update_request_state,
    test_verify_argmax,
    test_verify_probs,
)
RANDOM_ARGUMENTS: dict[str, Callable[[random.Random], dict[str, Any]]] = {
    module.NAME: module.random_arguments for module in MODULES
}
every_op = pytest.mark.parametrize("name", RANDOM_ARGUMENTS)
with_totals = pytest.mark.parametrize(
    "name",
    [
        name
        for name, arguments in RANDOM_ARGUMENTS.items()
        if any(totals in arguments(random.Random(0)) for totals in TOTALS)
    ],
)


class Placed(NamedTuple):
    """The tensors of a call as slices of wider buffers, with the same strides here and there."""

    here: dict[str, Any]
    there: dict[str, Any]
    buffers_here: dict[str, Tensor]
    buffers_there: dict[str, Tensor]

    def assert_equal(self, context: object) -> None:
        """What was written, and all that lies beside it."""
        for key, here in self.buffers_here.items():
            there = self.buffers_there[key]
            assert there.dtype == here.dtype
            assert torch.equal(there.cpu(), here), (
                f"{key} differs: {context}\n{self.there[key]}\n{self.here[key]}"
            )


def place(name: str, arguments: dict[str, Any], rng: random.Random) -> Placed:
    placed = Placed(dict(arguments), dict(arguments), {}, {})
    written = {a.name for a in schema_of(name).arguments if a.alias_info is not None}
    for key, values in arguments.items():
        if not isinstance(values, Tensor):
            continue
        slices = []
        for dim, size in enumerate(values.shape):
            is_row = name == "sample_recovered_probs_" and dim == values.dim() - 1
            step = 1 if is_row else rng.randint(1, 2)
            slices.append(slice(MARGIN, MARGIN + size * step, step))
        buffer = values.new_full([s.stop + MARGIN for s in slices], GUARD)
        view = buffer[tuple(slices)]
        view.copy_(values)
        if key not in written and values.dim() == 1 and len(values) > 1 and len(values.unique()) == 1:
            view = view[:1].expand(values.shape)
        placed.buffers_here[key], placed.here[key] = buffer, view
        placed.buffers_there[key] = buffer.to(DEVICE)
        placed.there[key] = placed.buffers_there[key].as_strided(
            view.shape, view.stride(), view.storage_offset()
        )
    return placed


def schema_of(name: str) -> Any:
    return getattr(torch.ops.specdec_ops, name).default._schema


def call(name: str, arguments: dict[str, Any]) -> None:
    assert getattr(specdec_ops, name)(**arguments) is None


@every_op
def test_writes_what_the_cpu_writes(name: str) -> None:
    """Dtypes mixed, any strides."""
    for seed in range(200):
        rng = random.Random(seed)
        placed = place(name, RANDOM_ARGUMENTS[name](rng), rng)
        call(name, placed.here)
        call(name, placed.there)
        placed.assert_equal(f"seed {seed}")


@every_op
def test_more_requests_and_tokens_than_threads(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_batches.Batch, "max_size", 1500)
    monkeypatch.setattr(runner_batches.Batch, "max_size", 600)
    for max_query_len, seed in ((7, 1), (7, 2), (7, 3), (300, 4), (1, 5)):
        monkeypatch.setattr(runner_batches.Batch, "max_query_len", max_query_len)
        rng = random.Random(seed)
        placed = place(name, RANDOM_ARGUMENTS[name](rng), rng)
        call(name, placed.here)
        call(name, placed.there)
        placed.assert_equal(f"seed {seed}")


def garbage(totals: Tensor, rng: random.Random) -> Tensor:
    largest = torch.iinfo(totals.dtype).max
    numbers = [0, 1, 2, 3, 5, 9, 40, -1, -5, 1000, 2**31 - 1, largest, largest - 1, -largest, -largest - 1]
    return torch.tensor([rng.choice(numbers) for _ in totals], dtype=totals.dtype)


@with_totals
def test_totals_of_any_value_lead_nowhere(name: str) -> None:
    """Their contents cannot be read ahead: what they say is clamped, and nothing beside a tensor changes."""
    written = {a.name for a in schema_of(name).arguments if a.alias_info is not None}
    for seed in range(200):
        rng = random.Random(seed)
        arguments = RANDOM_ARGUMENTS[name](rng)
        for key in TOTALS:
            if isinstance(arguments.get(key), Tensor):
                arguments[key] = garbage(arguments[key], rng)
        if arguments.get("accept_rates") is not None:
            arguments["accept_rates"] = arguments["accept_rates"][:1]
        placed = place(name, arguments, rng)
        call(name, placed.there)
        torch.cuda.synchronize()
        for key in written & placed.buffers_here.keys():
            placed.there[key].copy_(placed.here[key])
        placed.assert_equal(f"seed {seed}")


@pytest.mark.parametrize("name", ["expand_draft_inputs_", "expand_dflash_inputs_"])
def test_what_an_output_has_no_room_for_is_dropped(name: str) -> None:
    """How long the outputs over tokens must be is not known ahead."""
    shortened = {
        "expand_draft_inputs_": (
            "input_ids",
            "positions",
            "is_rejected_token_mask",
            "is_masked_token_mask",
            "hidden_state_mapping",
        ),
        "expand_dflash_inputs_": ("context_positions", "context_slot_mapping"),
    }[name]
    written = {a.name for a in schema_of(name).arguments if a.alias_info is not None}
    for seed in range(100):
        rng = random.Random(seed)
        arguments = RANDOM_ARGUMENTS[name](rng)
        key = rng.choice(shortened)
        if arguments[key] is None:
            continue
        arguments[key] = arguments[key][: len(arguments[key]) // 2]
        placed = place(name, arguments, rng)
        call(name, placed.there)
        torch.cuda.synchronize()
        for key in written & placed.buffers_here.keys():
            placed.there[key].copy_(placed.here[key])
        placed.assert_equal(f"seed {seed}")


@every_op
def test_graphs_replay_on_new_values(name: str) -> None:
    """Captured on totals of 0, replayed on others: sizes depend on shapes alone."""
    for seed in range(8):
        rng = random.Random(seed)
        placed = place(name, RANDOM_ARGUMENTS[name](rng), rng)
        for buffer in placed.buffers_there.values():
            buffer.zero_()
        call(name, placed.there)  # loads the kernel
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call(name, placed.there)
        for _ in range(2):
            for key, buffer in placed.buffers_there.items():
                buffer.copy_(placed.buffers_here[key])
            graph.replay()
        torch.cuda.synchronize()
        call(name, placed.here)
        placed.assert_equal(f"seed {seed}")


@every_op
def test_nothing_waits_for_the_device(name: str) -> None:
    rng = random.Random(1)
    there = place(name, RANDOM_ARGUMENTS[name](rng), rng).there
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call(name, there)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@every_op
def test_every_tensor_must_be_on_the_device(name: str) -> None:
    for seed in range(3):
        rng = random.Random(seed)
        placed = place(name, RANDOM_ARGUMENTS[name](rng), rng)
        for key in placed.buffers_here:
            with pytest.raises(
                RuntimeError, match=rf"^{name}: \w+ must be on the device of the other tensors"
            ):
                call(name, {**placed.there, key: placed.here[key]})


FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def recovered_arguments(seed: int, vocab_size: int, one_hot: bool) -> dict[str, Any]:
    """Rows with ties, and with what is no number."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    counts = [rng.choice((0, 1, 2, 5)) for _ in range(rng.choice((1, 4, 300 if vocab_size < 3000 else 6)))]
    num_drafts = sum(counts) + rng.choice((0, 2))

    def rows(count: int, dtype: torch.dtype) -> Tensor:
        values = torch.rand(count, vocab_size, generator=generator, dtype=torch.float64)
        if rng.random() < 0.5:
            values = (values * 8).round() / 8
        for row in values:
            if rng.random() < 0.2:
                row[rng.randrange(vocab_size)] = rng.choice((float("nan"), float("inf"), -1.0, 1e-42))
            if rng.random() < 0.1:
                row.fill_(rng.choice((0.0, float("nan"))))
        return values.to(dtype)

    return {
        "target_probs": rows(num_drafts, rng.choice(FLOATS)),
        "draft_token_ids": torch.randint(-1, vocab_size + 1, (num_drafts,), generator=generator),
        "cu_num_draft_tokens": torch.tensor([0, *counts]).cumsum(0),
        "inverse_noise": 1 / rows(len(counts), rng.choice(FLOATS[:2])),
        "draft_probs": None if one_hot else rows(num_drafts, rng.choice(FLOATS)),
        "vocab_size": rng.choice((None, max(1, vocab_size - 3))),
        "token_ids": torch.full((num_drafts,), draft_batches.POISON),
    }


@pytest.mark.parametrize("one_hot", [True, False])
@pytest.mark.parametrize("vocab_size", [1, 2, 255, 257, 2047, 2049, 4096, 4097, 12_289, 151_936])
def test_recovered_tokens_are_those_of_the_cpu(vocab_size: int, one_hot: bool) -> None:
    for seed in range(30 if vocab_size < 100_000 else 4):
        here = recovered_arguments(seed, vocab_size, one_hot)
        there = {key: value.to(DEVICE) if isinstance(value, Tensor) else value for key, value in here.items()}
        call("sample_recovered_probs_", here)
        call("sample_recovered_probs_", there)
        assert torch.equal(there["token_ids"].cpu(), here["token_ids"]), f"seed {seed}"
