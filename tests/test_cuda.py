"""The CUDA kernels: the CPU's results to the bit, streams, graphs, syncs, and large tensors."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import inputs
import pytest
import random_chains
import specdec_ops
import torch
from random_chains import EXTRAS
from specdec_ops.rules import TopN, Typical
from torch import Tensor

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

DEVICE = "cuda"
NAN = float("nan")


def strided_on_device(values: Tensor, row_gap: int, offset: int) -> Tensor:
    *rows, width = values.shape
    buffer = torch.full((*rows, offset + width + row_gap), NAN, dtype=values.dtype, device=DEVICE)
    view = buffer[..., offset : offset + width]
    view.copy_(values)
    return view


def moved(arguments: inputs.Arguments, row_gap: int = 0, offset: int = 0) -> inputs.Arguments:
    """The arguments on the device; rows of logits in a wider buffer."""
    result: inputs.Arguments = {}
    for name, value in arguments.items():
        if not isinstance(value, Tensor):
            result[name] = value
        elif name in ("target_logits", "draft_logits", "draft_probs", "logits") and (row_gap or offset):
            result[name] = strided_on_device(value, row_gap, offset)
        else:
            result[name] = value.to(DEVICE)
    return result


def assert_same_bits(there: Any, here: Any, context: object) -> None:
    for name, a, b in zip(here._fields, there, here, strict=True):
        if b is None:
            assert a is None
            continue
        assert a.device.type == DEVICE and a.dtype == b.dtype and a.shape == b.shape
        same = a.cpu() == b
        if b.is_floating_point():
            same |= a.cpu().isnan() & b.isnan()
        assert same.all(), f"{name} differs at {(~same).nonzero()[:4].tolist()} of {context}:\n{a.cpu()}\n{b}"


@pytest.mark.parametrize("part", range(20))
def test_verify_chain_has_the_bits_of_the_cpu(part: int) -> None:
    for seed in range(part * 100, part * 100 + 100):
        arguments, flags, context = random_chains.random_chain(seed)
        here = specdec_ops.verify_chain(**arguments, **flags)
        gap, offset = random.Random(seed).choice(((0, 0), (0, 0), (8, 8), (3, 1), (2, 2), (4, 0)))
        there = specdec_ops.verify_chain(**moved(arguments, gap, offset), **flags)
        assert_same_bits(there, here, context)


@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("option", random_chains.OPTIONS)
def test_options_of_verify_chain_have_the_bits_of_the_cpu(option: str, part: int) -> None:
    for seed in range(part * 100, part * 100 + 100):
        arguments, flags, context = random_chains.random_chain_with(option, seed)
        here = specdec_ops.verify_chain(**arguments, **flags)
        gap, offset = random.Random(seed).choice(((0, 0), (0, 0), (8, 8), (3, 1)))
        there = specdec_ops.verify_chain(**moved(arguments, gap, offset), **flags)
        assert_same_bits(there, here, context)


@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("law", [False, True])
@pytest.mark.parametrize("filters", [False, True])
def test_sample_has_the_bits_of_the_cpu(filters: bool, law: bool, part: int) -> None:
    for seed in range(part * 100, part * 100 + 100):
        arguments, context = random_chains.for_sample(seed, filters=filters, law=law)
        here = specdec_ops.sample(**arguments)
        choice = random.Random(seed)
        there = specdec_ops.sample(**moved(arguments, choice.choice((0, 3)), choice.choice((0, 1))))
        assert_same_bits(there, here, context)


@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("filters", [False, True])
def test_sample_recovered_has_the_bits_of_the_cpu(filters: bool, part: int) -> None:
    for seed in range(part * 100, part * 100 + 100):
        arguments, context = random_chains.for_sample_recovered(seed, filters=filters)
        here = specdec_ops.sample_recovered(**arguments)
        there = specdec_ops.sample_recovered(**moved(arguments, *((3, 1) if seed % 3 == 0 else (0, 0))))
        assert_same_bits(there, here, context)


def test_count_accepted_has_the_bits_of_the_cpu() -> None:
    for dtype in (torch.int32, torch.int64):
        for batch, width in ((0, 3), (1, 1), (5, 6), (1000, 9)):
            ids = torch.randint(-3, 50, (batch, width * 2), generator=inputs.generator(width)).to(dtype)[
                :, ::2
            ]
            for vocab_size in (None, 30):
                here = specdec_ops.count_accepted(ids, vocab_size=vocab_size)
                there = specdec_ops.count_accepted(ids.to(DEVICE), vocab_size=vocab_size)
                assert_same_bits(there, here, (dtype, batch, width, vocab_size))


def large_chain(
    batch: int = 16, k: int = 4, vocab_size: int = 151_936, dtype: torch.dtype = torch.bfloat16, seed: int = 0
) -> inputs.Arguments:
    """A batch as an engine has it, on the device."""
    draw = torch.Generator(DEVICE).manual_seed(seed)

    def noise(rows: int) -> Tensor:
        return torch.randn(rows, vocab_size, generator=draw, device=DEVICE)

    target = 3 * noise(batch * (k + 1))
    draft = target.view(batch, k + 1, -1)[:, :k].reshape(batch * k, -1) + 0.6 * noise(batch * k)
    target, draft = target.to(dtype), draft.to(dtype)
    ids = specdec_ops.sample(
        draft, temperature=0.8, seeds=seed + 1, positions=torch.arange(batch * k, device=DEVICE)
    ).token_ids
    return {
        "target_logits": target,
        "draft_token_ids": ids,
        "cu_num_draft_tokens": torch.arange(batch + 1, device=DEVICE) * k,
        "temperature": torch.full((batch,), 0.8, device=DEVICE),
        "draft_logits": draft,
        "seeds": torch.arange(batch, device=DEVICE) + seed,
        "positions": torch.arange(batch, device=DEVICE) * 7,
        "max_num_draft_tokens": k,
    }


def on_host(arguments: inputs.Arguments) -> inputs.Arguments:
    return {n: v.cpu() if isinstance(v, Tensor) else v for n, v in arguments.items()}


@pytest.mark.parametrize("flags", [{}, EXTRAS], ids=["tokens", "extras"])
@pytest.mark.parametrize("batch", [1, 3, 16, 64])
def test_batches_of_real_size(batch: int, flags: dict[str, Any]) -> None:
    arguments = large_chain(batch)
    for law in ("logits", "logits and logsumexp", "one-hot"):
        if law == "logits and logsumexp":
            temperature, logits = arguments["temperature"][0], arguments["draft_logits"]
            arguments["draft_logsumexp"] = (logits.double() / temperature).logsumexp(-1)
        if law == "one-hot":
            del arguments["draft_logits"], arguments["draft_logsumexp"]
        here = specdec_ops.verify_chain(**on_host(arguments), **flags)
        assert_same_bits(specdec_ops.verify_chain(**arguments, **flags), here, (batch, law))


def test_repeated_calls_give_the_same_bits() -> None:
    arguments = large_chain(64)
    first = [t.cpu() for t in specdec_ops.verify_chain(**arguments) if t is not None]
    for _ in range(200):
        again = [t.cpu() for t in specdec_ops.verify_chain(**arguments) if t is not None]
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("batch", [1, 16])
def test_graph_replays_with_new_contents(batch: int) -> None:
    static = large_chain(batch)
    specdec_ops.verify_chain(**static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = specdec_ops.verify_chain(**static, **EXTRAS)
        # Memory that the op has given back is used by others in the same graph.
        scratch = torch.full((1 << 20,), 7, dtype=torch.int64, device=DEVICE)
    for seed in range(1, 6):
        fresh = large_chain(batch, seed=seed)
        for name, value in fresh.items():
            if isinstance(value, Tensor):
                static[name].copy_(value)
        graph.replay()
        assert_same_bits(out, specdec_ops.verify_chain(**on_host(fresh), **EXTRAS), seed)
    assert (scratch == 7).all()


@pytest.fixture
def no_syncs() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def test_no_call_waits_for_the_device(no_syncs: None) -> None:
    arguments = large_chain(4)
    out = specdec_ops.verify_chain(**arguments, **EXTRAS)
    specdec_ops.sample(arguments["target_logits"], seeds=1, positions=torch.arange(20, device=DEVICE))
    specdec_ops.sample_recovered(
        arguments["target_logits"][:16],
        arguments["draft_token_ids"],
        seeds=1,
        positions=torch.arange(16, device=DEVICE),
    )
    specdec_ops.count_accepted(out.token_ids)
    specdec_ops.verify_chain(**arguments, rule=Typical())
    indices = (3 * torch.arange(4, device=DEVICE)) % 4
    cache = arguments.pop("draft_logits").unflatten(0, (4, 4))
    specdec_ops.verify_chain(**arguments, draft_logits=cache, request_indices=indices)
    specdec_ops.sample(
        arguments["target_logits"][:4],
        temperature=arguments["temperature"],
        seeds=arguments["seeds"],
        positions=arguments["positions"],
        request_indices=indices,
        draft_slot=indices,
        law_size=64,
    )


def test_ops_run_on_the_current_stream() -> None:
    arguments = large_chain(8)
    expected = specdec_ops.verify_chain(**on_host(arguments))
    late = torch.zeros_like(arguments["target_logits"])
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late.copy_(arguments["target_logits"])
        out = specdec_ops.verify_chain(**{**arguments, "target_logits": late})
    stream.synchronize()
    assert_same_bits(out, expected, "a late producer")


def test_calls_on_several_streams_at_once() -> None:
    batches = [large_chain(64, seed=s) for s in range(3)]
    expected = [[t.cpu() for t in specdec_ops.verify_chain(**b)[:3]] for b in batches]
    streams = [torch.cuda.Stream() for _ in batches]
    torch.cuda.synchronize()
    for _ in range(20):
        outs = []
        for stream, batch in zip(streams, batches, strict=True):
            with torch.cuda.stream(stream):
                outs.append(specdec_ops.verify_chain(**batch))
        torch.cuda.synchronize()
        for out, wanted in zip(outs, expected, strict=True):
            assert all(torch.equal(a.cpu(), b) for a, b in zip(out[:3], wanted, strict=True))


def test_rows_beyond_2_to_the_31_elements() -> None:
    vocab_size, rows = 151_936, 14_200
    logits = torch.full((rows, vocab_size), -1.0, dtype=torch.bfloat16, device=DEVICE)
    assert logits.numel() > 2**31
    winners = torch.arange(rows, device=DEVICE) % vocab_size
    logits.scatter_(1, winners[:, None], 60.0)
    out = specdec_ops.sample(logits, seeds=1, positions=torch.arange(rows, device=DEVICE))
    assert torch.equal(out.token_ids, winners)
    greedy = specdec_ops.verify_chain(
        logits,
        winners.view(-1, 2)[:, 0].contiguous(),
        torch.arange(rows // 2 + 1, device=DEVICE),
        temperature=0.0,
        max_num_draft_tokens=1,
    )
    assert torch.equal(greedy.token_ids, winners.view(-1, 2))


def test_counts_that_nobody_checked_stay_inside_the_tensors() -> None:
    chain = large_chain(4, vocab_size=1000)
    given_bonus = {
        "target_logits": chain["target_logits"][:16],
        "bonus_token_ids": torch.arange(4, device=DEVICE),
    }
    for options in (
        {},
        given_bonus,
        {"accept_rates": torch.ones(40, device=DEVICE)},
        {"fly_window_size": 1, "fly_entropy_threshold": 0.0},
        {"rule": TopN(), "rule_mask": torch.ones(16, dtype=torch.bool, device=DEVICE)},
    ):
        for most in (4, 40):
            for cu in ([0, 9, 3, 99, 16], [-5, -1, 2, 3, 1 << 40], [7, 7, 7, 7, 7], [0, 99, 0, 99, 0]):
                arguments = {**chain, **options, "max_num_draft_tokens": most}
                arguments["cu_num_draft_tokens"] = torch.tensor(cu, device=DEVICE)
                specdec_ops.verify_chain(**arguments, **EXTRAS)
                torch.cuda.synchronize()


def test_indices_that_nobody_checked_stay_inside_the_tensors() -> None:
    kept, _ = inputs.entries(
        "logits", indices=[6, 2, 5, 0], counts=[2, 0, 4, 1], max_requests=7, k=4, spoiled=False
    )
    there = moved(kept)
    there["request_indices"] = torch.tensor([99, -1, -(2**40), 2**40], device=DEVICE)
    out = specdec_ops.verify_chain(**there, **EXTRAS)
    kept["request_indices"] = torch.tensor([6, 1, 1, 6])
    assert float(kept["temperature"][1]) == 0.0
    assert_same_bits(out, specdec_ops.verify_chain(**kept, **EXTRAS), "as if greedy, or the last")
    rows = {"logits": kept["target_logits"][:4], "positions": kept["positions"], "seeds": kept["seeds"]}
    rows["temperature"] = kept["temperature"]
    out = specdec_ops.sample(**moved(rows), request_indices=there["request_indices"])
    assert_same_bits(
        out, specdec_ops.sample(**rows, request_indices=torch.tensor([6, -1, -1, 6])), "of no request"
    )


@pytest.mark.parametrize("law_size", [None, 20])
def test_graph_replays_with_other_requests_and_slots(law_size: int | None) -> None:
    kept, _ = inputs.entries(
        "logits", indices=[6, 2, 5], counts=[2, 0, 4], max_requests=7, k=4, spoiled=False
    )
    rows = {"logits": kept["target_logits"][:3], "positions": kept["positions"], "seeds": kept["seeds"]}
    rows |= {"temperature": kept["temperature"], "request_indices": kept["request_indices"]}
    rows |= {"draft_slot": torch.tensor(0), "law_size": law_size}
    chain_there, rows_there = moved(kept), moved(rows)
    specdec_ops.verify_chain(**chain_there), specdec_ops.sample(**rows_there)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        verified, sampled = specdec_ops.verify_chain(**chain_there), specdec_ops.sample(**rows_there)
    for slot, indices in enumerate(([6, 2, 5], [0, 0, 3], [4, 1, 6])):
        for arguments in (kept, rows, chain_there, rows_there):
            arguments["request_indices"].copy_(torch.tensor(indices))
        for arguments in (rows, rows_there):
            arguments["draft_slot"].fill_(slot)
        graph.replay()
        assert_same_bits(verified, specdec_ops.verify_chain(**kept), indices)
        assert_same_bits(sampled, specdec_ops.sample(**rows), (indices, slot))


def test_arguments_on_another_device_are_refused() -> None:
    arguments = large_chain(2, vocab_size=100)
    arguments["seeds"] = arguments["seeds"].cpu()
    with pytest.raises(RuntimeError, match="verify_chain: seeds must be on the device of the other tensors"):
        specdec_ops.verify_chain(**arguments)


def test_without_random_numbers_every_request_is_greedy() -> None:
    arguments = large_chain(3, vocab_size=1000)
    del arguments["seeds"], arguments["positions"]
    out = specdec_ops.verify_chain(**arguments)
    arguments["temperature"] = 0.0
    assert_same_bits(out, specdec_ops.verify_chain(**on_host(arguments)), "greedy")
