"""What the plug-in puts in the place of ``RejectionSampler.forward``, called as the engine calls it."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm.v1.sample.rejection_sampler as engine
from specdec_ops.integrations.vllm import _plugin, _rejection_sampler, _report
from torch import Tensor
from vllm.platforms import current_platform
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.logits_processor.builtin import MinTokensLogitsProcessor
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from tests.chi_square import p_value

VOCAB_SIZE = 50
#: A chi-square test alarms below this.
ALARM = 1e-4
INT32 = torch.int32


@pytest.fixture(scope="module", autouse=True)
def installed() -> None:
    current_platform.import_kernels()
    _plugin.register()
    current_platform.register_triton_kernel_overrides()


@pytest.fixture(autouse=True)
def fresh_report() -> Iterator[None]:
    _report.calls.clear()
    _report.handed_over.clear()
    torch.manual_seed(0)
    yield


def spec_decode(drafts: list[list[int]]) -> SpecDecodeMetadata:
    """The metadata of a step, with the engine's layout of rows: a request's drafts, then its bonus row."""
    counts = torch.tensor([len(ids) for ids in drafts])
    bonus = (counts + 1).cumsum(0) - 1
    is_bonus = torch.zeros(int(counts.sum()) + len(drafts), dtype=torch.bool)
    is_bonus[bonus] = True
    return SpecDecodeMetadata(
        draft_token_ids=torch.tensor([token for ids in drafts for token in ids], dtype=INT32),
        num_draft_tokens=counts.tolist(),
        cu_num_draft_tokens=counts.cumsum(0).to(INT32),
        cu_num_sampled_tokens=(counts + 1).cumsum(0).to(INT32),
        target_logits_indices=(~is_bonus).nonzero().flatten().to(INT32),
        bonus_logits_indices=bonus.to(INT32),
        logits_indices=torch.arange(len(is_bonus), dtype=INT32),
    )


def sampling(temperature: list[float], **more: Any) -> SamplingMetadata:
    """Sampling metadata of requests that ask for nothing but what is given."""
    batch, none = len(temperature), torch.empty(0)
    greedy = [t == 0.0 for t in temperature]
    plain = SamplingMetadata(
        temperature=None if all(greedy) else torch.tensor(temperature),
        all_greedy=all(greedy),
        all_random=not any(greedy),
        top_p=None,
        top_k=None,
        generators={},
        max_num_logprobs=None,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=none,
        presence_penalties=none,
        repetition_penalties=none,
        output_token_ids=[[] for _ in range(batch)],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(),
    )
    return dataclasses.replace(plain, **more)


def run(
    drafts: list[list[int]],
    logits: Tensor,
    metadata: SamplingMetadata,
    draft_probs: Tensor | None = None,
    sampler: Any = None,
    logprobs_mode: str = "raw_logprobs",
) -> Any:
    """One step; the output of the engine."""
    sampler = sampler or engine.RejectionSampler(Sampler(logprobs_mode=logprobs_mode))
    return sampler(spec_decode(drafts), draft_probs, logits.clone(), metadata)


def stock(
    drafts: list[list[int]], logits: Tensor, metadata: SamplingMetadata, logprobs_mode: str = "raw_logprobs"
) -> Any:
    """The same through the engine's own ``forward``."""
    forward = _plugin._stock(engine.RejectionSampler, "forward")
    sampler = engine.RejectionSampler(Sampler(logprobs_mode=logprobs_mode))
    return forward(sampler, spec_decode(drafts), None, logits.clone(), metadata)


def rows(drafts: list[list[int]], seed: int = 1) -> Tensor:
    """Random logits whose argmax is the draft for most drafts."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(sum(map(len, drafts)) + len(drafts), VOCAB_SIZE, generator=generator)
    metadata = spec_decode(drafts)
    agree = torch.rand(len(metadata.draft_token_ids), generator=generator) < 0.7
    chosen = metadata.target_logits_indices.long()[agree]
    logits[chosen, metadata.draft_token_ids.long()[agree].clamp(min=0)] = 9.0
    return logits


def ragged(batch: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    counts = torch.randint(0, 4, (batch,), generator=generator).tolist()
    return [torch.randint(0, VOCAB_SIZE, (count,), generator=generator).tolist() for count in counts]


def penalties(batch: int) -> dict[str, Any]:
    return {
        "no_penalties": False,
        "prompt_token_ids": torch.randint(0, VOCAB_SIZE, (batch, 6)),
        "frequency_penalties": torch.full((batch,), 0.7),
        "presence_penalties": torch.full((batch,), 0.4),
        "repetition_penalties": torch.full((batch,), 1.3),
        "output_token_ids": [[3, 4, 4]] * batch,
    }


def min_tokens(output: list[int], stops: list[int], grammar: bool = False) -> LogitsProcessors:
    """Request 0 may not stop before it has ten tokens."""
    processor = MinTokensLogitsProcessor(None, torch.device("cpu"), False)  # type: ignore[arg-type]
    processor.min_toks = {0: (10, output, set(stops), grammar)}
    slices = (torch.zeros(len(stops), dtype=INT32), torch.tensor(stops, dtype=INT32))
    processor.logits_slice = slices
    if grammar:
        processor.restore_logits_slice = slices
    return LogitsProcessors([processor])


GREEDY_FEATURES: dict[str, Callable[[int], dict[str, Any]]] = {
    "nothing": lambda batch: {},
    "penalties": penalties,
    "allowed ids": lambda batch: {
        "allowed_token_ids_mask": torch.arange(VOCAB_SIZE).expand(batch, -1) % 3 == 0
    },
    "bad words": lambda batch: {
        "bad_words_token_ids": {0: [[5], [8, 9]], batch - 1: [[4, 4], [1], [4, 4, 4, 2]]},
        "output_token_ids": [[3, 4, 4]] * batch,
    },
    "min tokens": lambda batch: {"logitsprocs": min_tokens([1, 2], [7])},
    "min tokens, grammar": lambda batch: {"logitsprocs": min_tokens([1, 2], [7], grammar=True)},
    "all": lambda batch: {
        **penalties(batch),
        **GREEDY_FEATURES["allowed ids"](batch),
        **GREEDY_FEATURES["bad words"](batch),
        "logitsprocs": min_tokens([3, 4, 4], [7, 9]),
    },
}


@pytest.mark.parametrize("feature", GREEDY_FEATURES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_greedy_tokens_are_those_of_the_engine(feature: str, dtype: torch.dtype) -> None:
    for seed in range(5):
        drafts = [*ragged(7, seed), [4, 4, 4]]
        metadata = sampling([0.0] * 8, **GREEDY_FEATURES[feature](8), spec_token_ids=drafts)
        logits = rows(drafts, seed).to(dtype)
        assert torch.equal(
            run(drafts, logits, metadata).sampled_token_ids, stock(drafts, logits, metadata).sampled_token_ids
        )
    assert _report.calls["RejectionSampler.forward"] == 5
    assert not _report.handed_over


@pytest.mark.parametrize("feature", ["nothing", "penalties"])
@pytest.mark.parametrize("mode", ["raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"])
@pytest.mark.parametrize("temperature", [[0.0] * 4, [0.0, 0.0, 0.0, 1.0]], ids=["greedy", "mixed"])
def test_logprobs_are_those_of_the_engine(feature: str, mode: str, temperature: list[float]) -> None:
    """In the mixed batch the sampled request can emit one token alone."""
    drafts = [[1, 2], [], [3], [4]]
    metadata = sampling(temperature, max_num_logprobs=2, **GREEDY_FEATURES[feature](4), spec_token_ids=drafts)
    logits = rows(drafts)
    logits[-2:] = -1e4
    logits[-2:, 6] = 0.0
    ours = run(drafts, logits, metadata, logprobs_mode=mode)
    theirs = stock(drafts, logits, metadata, mode)
    assert torch.equal(ours.sampled_token_ids, theirs.sampled_token_ids)
    emitted = (ours.sampled_token_ids >= 0).flatten()
    for name in ("logprob_token_ids", "logprobs", "selected_token_ranks"):
        one, other = (getattr(out.logprobs_tensors, name)[emitted] for out in (ours, theirs))
        assert torch.equal(one, other), name


def engine_after_filters(logits: Tensor, metadata: SamplingMetadata, counts: list[int]) -> Tensor:
    """Rows, as many of each request as counted, after the engine's temperature, top-k and top-p."""
    rows, totals = logits.to(torch.float32), torch.tensor(counts).cumsum(0).to(INT32)
    return engine.apply_sampling_constraints(rows, totals, metadata)  # type: ignore[no-any-return]


def random_filters(batch: int, seed: int) -> dict[str, Any]:
    """Of each request its own; some have none."""
    generator = torch.Generator().manual_seed(seed)
    top_k = torch.randint(1, VOCAB_SIZE + 1, (batch,), generator=generator)
    top_p = torch.rand(batch, generator=generator).clamp(min=0.05)
    none = torch.rand(2, batch, generator=generator) < 0.25
    filters = {
        "top_k": top_k.masked_fill(none[0], VOCAB_SIZE).to(INT32),
        "top_p": top_p.masked_fill(none[1], 1.0),
    }
    if seed % 3 < 2:
        del filters[("top_k", "top_p")[seed % 3]]
    return filters


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_filters_keep_what_the_engine_keeps(dtype: torch.dtype) -> None:
    """As processed logits show it: all of them, scaled, and the same left out."""
    ties = 0
    for seed in range(30):
        drafts = [*ragged(7, seed), [4, 4, 4]]
        filters = random_filters(8, seed)
        temperature = (0.5 + torch.rand(8)).tolist()
        metadata = sampling(temperature, max_num_logprobs=VOCAB_SIZE, **filters)
        logits = (2 * torch.randn(sum(map(len, drafts)) + 8, VOCAB_SIZE)).to(dtype)
        out = run(drafts, logits, metadata, logprobs_mode="processed_logits")
        theirs = engine_after_filters(logits, metadata, [len(ids) + 1 for ids in drafts])
        shown = out.logprobs_tensors
        ours = torch.full_like(theirs, math.nan)
        first = 0
        for r, ids in enumerate(drafts):
            for slot in range(len(ids) + 1):
                place = 4 * r + slot
                where = shown.logprob_token_ids[place, 1:].long()
                ours[first].scatter_(0, where, shown.logprobs[place, 1:])
                token = out.sampled_token_ids[r, slot]
                assert token < 0 or ours[first, token] > -math.inf
                first += 1
        kept = theirs > -math.inf
        assert torch.equal(ours[kept], theirs[kept])
        # Of equal logits at the end of top-p, the engine's sort keeps some, and the op all.
        more = (ours > -math.inf) & ~kept
        last = theirs.masked_fill(~kept, math.inf).amin(dim=1, keepdim=True).expand_as(ours)
        assert torch.equal(ours[more], last[more])
        ties += int(more.sum())
    assert (ties > 0) == (dtype == torch.bfloat16)
    assert not _report.handed_over


@pytest.mark.parametrize("mode", ["raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"])
@pytest.mark.parametrize("feature", ["nothing", "penalties", "all"])
def test_logprobs_of_filtered_requests_are_those_of_the_engine(mode: str, feature: str) -> None:
    """Those that its functions give for the tokens that were drawn."""
    for seed in range(10):
        drafts = [[4, 4, 4], *ragged(4, seed)]
        more = GREEDY_FEATURES[feature](5) | random_filters(5, seed)
        metadata = sampling([0.8, 0.0, 1.2, 0.5, 1.0], max_num_logprobs=3, spec_token_ids=drafts, **more)
        # Greedy requests have no filters.
        for name, off in (("top_k", VOCAB_SIZE), ("top_p", 1.0)):
            if getattr(metadata, name) is not None:
                getattr(metadata, name)[1] = off
        logits = rows(drafts, seed)
        ours = run(drafts, logits, metadata, logprobs_mode=mode)

        sampler, steps = engine.RejectionSampler(Sampler(logprobs_mode=mode)), spec_decode(drafts)
        target, bonus = logits[steps.target_logits_indices], logits[steps.bonus_logits_indices]
        if mode.startswith("processed"):
            target = sampler.apply_logits_processors(target, metadata, steps)
            target = engine_after_filters(target, metadata, steps.num_draft_tokens)
            bonus = sampler.sampler.apply_logits_processors(bonus, metadata, True)
            bonus = engine_after_filters(bonus, metadata, [1] * 5)
        theirs = sampler._get_logprobs_tensors(3, steps, logits, target, bonus, ours.sampled_token_ids)
        emitted = (ours.sampled_token_ids >= 0).flatten()
        one, other = ours.logprobs_tensors, theirs
        # The engine multiplies by the reciprocal of a repetition penalty.
        tolerance = {"rtol": 0.0, "atol": 0.0} if feature == "nothing" else {"rtol": 1e-6, "atol": 2e-6}
        torch.testing.assert_close(one.logprobs[emitted], other.logprobs[emitted], **tolerance)
        assert torch.equal(one.selected_token_ranks[emitted], other.selected_token_ranks[emitted])
        # Of masked ids none comes first.
        one, other = (ids.logprob_token_ids.masked_fill(ids.logprobs.isneginf(), -1) for ids in (one, other))
        assert torch.equal(one[emitted], other[emitted])


class Verified:
    """What ``verify_chain`` was given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows = torch.empty(0)
        self.arguments: dict[str, Any] = {}
        verify_chain = _rejection_sampler.verify_chain

        def noting(rows: Tensor, *args: Any, **arguments: Any) -> Any:
            self.rows, self.arguments = rows, arguments
            return verify_chain(rows, *args, **arguments)

        monkeypatch.setattr(_rejection_sampler, "verify_chain", noting)


#: What is computed in float32, and so makes a copy of other logits.
IN_FLOAT32 = ("penalties", "min tokens, grammar", "all")


@pytest.mark.parametrize("feature", GREEDY_FEATURES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_logits_are_not_copied(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, feature: str) -> None:
    """Filters need no copy; masks and penalties are written where the engine says that it does not mind."""
    verified = Verified(monkeypatch)
    drafts = [[4, 4, 4], [], [1]]
    filters = random_filters(3, 2)
    metadata = sampling([0.8, 0.0, 1.0], **(GREEDY_FEATURES[feature](3) | filters), spec_token_ids=drafts)
    logits = rows(drafts).to(dtype)
    before = logits.clone()
    engine.RejectionSampler(Sampler())(spec_decode(drafts), None, logits, metadata)
    assert (verified.rows.data_ptr() == logits.data_ptr()) == (
        dtype == torch.float32 or feature not in IN_FLOAT32
    )
    assert verified.rows.dtype == (torch.float32 if feature in IN_FLOAT32 else dtype)
    assert torch.equal(logits, before) == (feature == "nothing" or verified.rows is not logits)
    assert verified.arguments["top_k"] is filters["top_k"] and verified.arguments["top_p"] is filters["top_p"]
    # Raw log-probabilities are of what was there before.
    logits = before.clone()
    metadata = dataclasses.replace(metadata, max_num_logprobs=1)
    engine.RejectionSampler(Sampler())(spec_decode(drafts), None, logits, metadata)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("feature", ["nothing", "penalties"])
def test_a_bonus_token_counts_the_drafts_before_it(feature: str, dtype: torch.dtype) -> None:
    """As plain decoding does: the tenth token may not be a stop token, the eleventh may."""
    logits = torch.full((4, VOCAB_SIZE), -20.0, dtype=dtype)
    logits[:, 7], logits[:, 5] = 9.0, 8.0
    for length, tokens in ((6, [5, 5, 5, 5]), (7, [5, 5, 5, 7]), (8, [5, 5, 7, -1]), (10, [7, -1, -1, -1])):
        output = [1] * length
        more: dict[str, Any] = {"logitsprocs": min_tokens(output, [7])}
        if feature == "penalties":
            more |= {**penalties(1), "prompt_token_ids": torch.full((1, 2), 3), "output_token_ids": [output]}
            more["frequency_penalties"] = torch.tensor([0.01])
        metadata = sampling([0.0], **more, spec_token_ids=[[5, 5, 5]])
        assert run([[5, 5, 5]], logits, metadata).sampled_token_ids.tolist() == [tokens], length


def test_bad_words_reach_from_the_output_into_the_drafts() -> None:
    logits = torch.full((3, VOCAB_SIZE), -20.0)
    logits[0, 4] = logits[1, 2] = logits[2, 4] = 9.0
    logits[:, 5] = 8.0
    for output, token in (([3, 4, 4], 5), ([4, 3, 4], 2)):
        words = {0: [[4, 4, 4, 2], [9]], 1: [[5]]}
        more = {"bad_words_token_ids": words, "output_token_ids": [output, []], "spec_token_ids": [[4], []]}
        tokens = run([[4], []], logits, sampling([0.0, 0.0], **more)).sampled_token_ids
        assert tokens.tolist() == [[4, token], [4, -1]]


def test_a_grammar_may_leave_nothing_but_stop_tokens() -> None:
    """Then they stay, though the request has not its minimum length: as in the engine.

    Else they go, in the bonus row too.
    """
    logits = torch.full((4, VOCAB_SIZE), -math.inf)
    logits[:, 5], logits[:, 7] = 1.0, 2.0
    metadata = sampling([0.0, 0.0], logitsprocs=min_tokens([1], [7], True), spec_token_ids=[[5], [7]])
    assert run([[5], [7]], logits, metadata).sampled_token_ids.tolist() == [[5, 5], [7, 7]]
    logits = torch.full((2, VOCAB_SIZE), -math.inf)
    logits[0, 5] = logits[0, 7] = logits[1, 7] = 1.0
    for grammar, bonus in ((True, 7), (False, 0)):
        metadata = sampling([0.0], logitsprocs=min_tokens([1], [7], grammar), spec_token_ids=[[5]])
        assert run([[5]], logits, metadata).sampled_token_ids.tolist() == [[5, bonus]]


def test_rows_in_another_order_are_gathered() -> None:
    """As in the engine's profiling run, where every index is 0."""
    drafts = [[1, 2], [3]]
    logits = rows(drafts)
    want = run(drafts, logits, sampling([0.0, 0.0])).sampled_token_ids
    order = torch.tensor([4, 2, 0, 1, 3])
    moved = spec_decode(drafts)
    place = order.argsort().to(INT32)
    moved.target_logits_indices = place[moved.target_logits_indices.long()]
    moved.bonus_logits_indices = place[moved.bonus_logits_indices.long()]
    sampler = engine.RejectionSampler(Sampler())
    assert torch.equal(sampler(moved, None, logits[order], sampling([0.0, 0.0])).sampled_token_ids, want)
    dummy = SpecDecodeMetadata.make_dummy(drafts, torch.device("cpu"))
    assert sampler(dummy, None, logits, sampling([0.0, 1.0])).sampled_token_ids.shape == (2, 3)


def generators(*requests: int) -> dict[int, torch.Generator]:
    return {r: torch.Generator().manual_seed(1234) for r in requests}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("filtered", [False, True], ids=["my own law", "with filters of mine"])
@pytest.mark.parametrize("num_drafts", [0, 1, 3])
def test_seeded_requests_do_not_notice_their_batch(
    num_drafts: int, filtered: bool, dtype: torch.dtype
) -> None:
    """Alone, beside greedy requests, and beside requests whose parameters change the whole batch's path."""
    mine, own = [[4, 5, 6][:num_drafts]], torch.randn(num_drafts + 1, VOCAB_SIZE).to(dtype)
    mates = [[1, 2], [], [7]]
    logits = torch.cat([own, rows(mates).to(dtype)])
    temperature = [0.9, 0.0, 1.2, 0.5]
    my_k, my_p = (20, 0.8) if filtered else (VOCAB_SIZE, 1.0)
    k = torch.tensor([my_k, VOCAB_SIZE, 3, 2], dtype=INT32)
    p = torch.tensor([my_p, 1.0, 0.4, 0.2])
    mine_alone = {"top_k": k[:1], "top_p": p[:1]} if filtered else {}
    among_unfiltered = {"top_k": k.clone(), "top_p": p.clone()} if filtered else {}
    for name, off in (("top_k", VOCAB_SIZE), ("top_p", 1.0)):
        if filtered:
            among_unfiltered[name][1:] = off
    punished = penalties(4)
    for name, neutral in (("repetition", 1.0), ("frequency", 0.0), ("presence", 0.0)):
        punished[f"{name}_penalties"][0] = neutral
    batches = [
        among_unfiltered,
        {"top_k": k, "top_p": p},
        among_unfiltered | {"max_num_logprobs": 1},
        {"top_k": k, "top_p": p} | punished,
        among_unfiltered | {"bad_words_token_ids": {1: [[5], [1, 2, 6]]}},
        among_unfiltered
        | {"allowed_token_ids_mask": torch.arange(4)[:, None].ge(1) & (torch.arange(VOCAB_SIZE) % 3 == 0)},
    ]
    if not filtered:
        batches += [{"top_k": k}, {"top_p": p}]
    for step in range(20):
        seeds = {0: torch.Generator().manual_seed(step)}
        alone = run(mine, own, sampling([0.9], generators=seeds, **mine_alone)).sampled_token_ids
        for more in batches:
            seeds = {0: torch.Generator().manual_seed(step)}
            metadata = sampling(temperature, generators=seeds, spec_token_ids=mine + mates, **more)
            together = run(mine + mates, logits, metadata)
            mine_there = together.sampled_token_ids[0, : num_drafts + 1]
            assert torch.equal(mine_there, alone[0]), (step, more.keys())


def test_seeds_decide() -> None:
    drafts, logits = [[1, 2, 3]] * 6, torch.zeros(24, VOCAB_SIZE)
    out = run(drafts, logits, sampling([1.0] * 6, generators=generators(0, 1, 4)))
    tokens = out.sampled_token_ids
    assert torch.equal(tokens[0], tokens[1]) and torch.equal(tokens[0], tokens[4])
    assert len({tuple(row) for row in tokens[[0, 2, 3, 5]].tolist()}) == 4
    torch.manual_seed(7)
    first = run(drafts, logits, sampling([1.0] * 6)).sampled_token_ids
    torch.manual_seed(7)
    assert torch.equal(run(drafts, logits, sampling([1.0] * 6)).sampled_token_ids, first)


LAWS: dict[str, Callable[[int], dict[str, Any]]] = {
    "temperature": lambda n: {},
    "top-k": lambda n: {"top_k": torch.full((n,), 5, dtype=INT32)},
    "top-p": lambda n: {"top_p": torch.full((n,), 0.6)},
    "top-k and top-p": lambda n: {"top_k": torch.full((n,), 8, dtype=INT32), "top_p": torch.full((n,), 0.8)},
    "penalties": lambda n: penalties(n) | {"prompt_token_ids": torch.zeros(n, 1, dtype=torch.int64)},
}


def law_of(logits: Tensor, feature: str, temperature: float) -> Tensor:
    """The law of a token by plain torch."""
    logits = logits.clone()
    if feature == "penalties":
        seen = torch.zeros(VOCAB_SIZE).index_add_(0, torch.tensor([3, 4, 4]), torch.ones(3))
        repeated = (seen > 0) | (torch.arange(VOCAB_SIZE) == 0)
        logits = torch.where(repeated, torch.where(logits > 0, logits / 1.3, logits * 1.3), logits)
        logits = logits - 0.7 * seen - 0.4 * (seen > 0)
    logits = logits / temperature
    if "top-k" in feature:
        logits[logits < logits.topk(5 if feature == "top-k" else 8).values[-1]] = -math.inf
    if "top-p" in feature:
        ordered, ids = logits.softmax(0).sort(descending=True)
        p = 0.6 if feature == "top-p" else 0.8
        logits[ids[ordered.cumsum(0) - ordered >= p]] = -math.inf
    return logits.double().softmax(0)


@pytest.mark.parametrize("feature", LAWS)
@pytest.mark.parametrize("drafter", ["n-gram", "draft model"])
def test_first_token_follows_the_law(feature: str, drafter: str) -> None:
    """Of many requests with one draft each, whatever drafted."""
    n, temperature = 8_000, 0.8
    row = torch.randn(VOCAB_SIZE)
    probs = None
    if drafter == "draft model":
        law = (row + torch.randn(VOCAB_SIZE)).softmax(0)
        ids, probs = torch.multinomial(law, n, replacement=True).tolist(), law.repeat(n, 1)
    else:
        ids = [int(row.argmax())] * n
    metadata = sampling([temperature] * n, **LAWS[feature](n), spec_token_ids=[[i] for i in ids])
    out = run([[i] for i in ids], row.repeat(2 * n, 1), metadata, probs)
    first = torch.bincount(out.sampled_token_ids[:, 0], minlength=VOCAB_SIZE)
    assert p_value(first, law_of(row, feature, temperature)) > ALARM
    # The test can fail: another temperature is another law.
    assert p_value(first, law_of(row, feature, 1.5)) < ALARM
    assert _report.calls["RejectionSampler.forward"] == 1


def test_bonus_tokens_follow_the_law() -> None:
    """The draft is certain, so each request emits a bonus token too."""
    n = 8_000
    row = torch.randn(VOCAB_SIZE)
    certain = torch.full((VOCAB_SIZE,), -math.inf)
    certain[3] = 0.0
    for more in ({}, {"top_k": torch.full((n,), 6, dtype=INT32)}):
        out = run([[3]] * n, torch.stack([certain, row]).repeat(n, 1), sampling([0.7] * n, **more))
        assert (out.sampled_token_ids[:, 0] == 3).all()
        logits = row / 0.7
        if more:
            logits = torch.where(logits < logits.topk(6).values[-1], -math.inf, logits)
        counts = torch.bincount(out.sampled_token_ids[:, 1], minlength=VOCAB_SIZE)
        assert p_value(counts, logits.double().softmax(0)) > ALARM


def test_grammar_masks_hold() -> None:
    """The engine masks rows of logits before it samples: nothing else is emitted, drafted or not."""
    n = 200
    logits = torch.randn(n * 3, VOCAB_SIZE)
    legal = torch.rand(n * 3, VOCAB_SIZE) < 0.1
    legal[:, 11] = True
    logits[~legal] = -math.inf
    drafts = torch.randint(0, VOCAB_SIZE, (n, 2)).tolist()
    for temperature in (0.0, 1.0):
        tokens = run(drafts, logits, sampling([temperature] * n)).sampled_token_ids
        legal_rows = legal.view(n, 3, VOCAB_SIZE)
        for slot in range(3):
            ids = tokens[:, slot]
            assert legal_rows[ids >= 0, slot, ids[ids >= 0].long()].all()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_placeholder_drafts_are_rejected(temperature: float) -> None:
    """-1 in the place of a draft: what follows comes from the target."""
    drafts = [[-1, 3], [2, -1, 4], [-1]]
    logits = torch.full((9, VOCAB_SIZE), -1e4)
    logits[:, 2] = 0.0
    tokens = run(drafts, logits, sampling([temperature] * 3)).sampled_token_ids
    assert tokens.tolist() == [[2, -1, -1, -1], [2, 2, -1, -1], [2, -1, -1, -1]]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("top_k", [False, True])
def test_synthetic_rates(temperature: float, top_k: bool) -> None:
    n = 4000
    sampler = engine.RejectionSampler(Sampler())
    sampler.synthetic_mode = True
    sampler.synthetic_conditional_rates = torch.tensor([0.8, 0.5])
    more = {"top_k": torch.full((n,), 4, dtype=INT32)} if top_k and temperature else {}
    metadata = sampling([temperature] * n, **more)
    tokens = run([[1, 2]] * n, torch.randn(n * 3, VOCAB_SIZE), metadata, sampler=sampler).sampled_token_ids
    accepted = torch.bincount((tokens >= 0).sum(dim=1) - 1, minlength=3)
    assert p_value(accepted, [0.2, 0.4, 0.4]) > ALARM


def test_fly_keeps_a_draft_that_the_next_ones_confirm() -> None:
    """Two equally good tokens at the first draft: the one that the target does not prefer is kept."""
    logits = torch.full((4, VOCAB_SIZE), -20.0)
    logits[0, 5], logits[0, 6] = 1.0, 0.9
    logits[1, 7] = logits[2, 8] = logits[3, 9] = 5.0
    sampler = engine.RejectionSampler(Sampler())
    want = {None: [5, -1, -1, -1], 2: [6, 7, 8, 9]}
    for window, tokens in want.items():
        sampler.fly_window_size, sampler.fly_entropy_threshold = window, 0.3
        out = run([[6, 7, 8]], logits, sampling([0.0]), sampler=sampler)
        assert out.sampled_token_ids.tolist() == [tokens]


@pytest.mark.parametrize("feature", [*GREEDY_FEATURES, *(law for law in LAWS if law.startswith("top"))])
@pytest.mark.parametrize("temperature", [[0.0, 0.0], [1.0, 1.0], [0.0, 0.7]], ids=str)
def test_no_request_has_a_draft(feature: str, temperature: list[float]) -> None:
    """A step of prompts alone: there is no draft row."""
    if feature.startswith("top") and not any(temperature):
        temperature = [0.0, 1.0]
    more = (GREEDY_FEATURES | LAWS)[feature](2)
    logits = torch.full((2, VOCAB_SIZE), -50.0)
    logits[:, 10] = 50.0
    metadata = sampling(temperature, **{"max_num_logprobs": 1, "spec_token_ids": [[], []], **more})
    assert run([[], []], logits, metadata).sampled_token_ids.tolist() == [[10], [10]]
    assert not _report.handed_over


class TestHandingOver:
    """What the engine's own ``forward`` does instead, by way of the replaced ``rejection_sample``."""

    def check(self, feature: str, out: Any) -> None:
        assert out.sampled_token_ids.shape == (2, 3)
        assert dict(_report.handed_over) == {feature: 1}
        assert dict(_report.calls) == {"rejection_sample": 1}

    def test_samplers_of_another_class(self) -> None:
        class OtherSampler(Sampler):
            pass

        drafts = [[1, 2], []]
        sampler = engine.RejectionSampler(OtherSampler())
        out = run(drafts, rows(drafts), sampling([1.0, 0.0]), sampler=sampler)
        self.check("samplers derived from vLLM's", out)

    def test_other_logits_processors(self) -> None:
        class Processor(MinTokensLogitsProcessor):
            pass

        processors = LogitsProcessors([Processor(None, torch.device("cpu"), False)])  # type: ignore[arg-type]
        drafts = [[1, 2], []]
        out = run(drafts, rows(drafts), sampling([1.0, 0.0], logitsprocs=processors))
        self.check("logits processor Processor", out)

    def test_thinking_budgets(self) -> None:
        holder = SimpleNamespace(
            has_tracked_requests=lambda: True,
            update_state=lambda *args, **kwargs: None,
            apply_to_logits=lambda logits, *args, **kwargs: logits,
        )
        drafts = [[1, 2], []]
        out = run(drafts, rows(drafts), sampling([1.0, 0.0], thinking_budget_state_holder=holder))
        self.check("thinking budgets", out)

    def test_coins_are_the_engines_own(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A draft with probability 0.4 is accepted with a coin of 0.39, and not with one of 0.41."""

        class OtherSampler(Sampler):
            pass

        logits = torch.full((2, VOCAB_SIZE), -math.inf)
        logits[0, 5], logits[0, 6], logits[1, 7] = math.log(0.4), math.log(0.6), 0.0
        for coin, tokens in ((0.39, [5, 7]), (0.41, [6, -1])):
            coins = torch.tensor([coin], dtype=torch.float64)
            monkeypatch.setattr(engine, "generate_uniform_probs", lambda *_, coins=coins: coins)
            out = run([[5]], logits, sampling([1.0]), sampler=engine.RejectionSampler(OtherSampler()))
            assert out.sampled_token_ids.tolist() == [tokens]

    def test_handed_over_requests_keep_their_seeds(self) -> None:
        """A seeded request repeats itself, and one without drafts leaves its generator to the bonus token."""

        class OtherSampler(Sampler):
            pass

        drafts = [[1, 2], [], [3]]
        sampler = engine.RejectionSampler(OtherSampler())
        seen = [
            run(drafts, rows(drafts), sampling([1.0] * 3, generators=generators(0, 1, 2)), sampler=sampler)
            for _ in range(2)
        ]
        assert torch.equal(seen[0].sampled_token_ids, seen[1].sampled_token_ids)


def block_sampler(method: str = "block") -> Any:
    """A rejection sampler as the engine makes it of its configuration."""
    config = SimpleNamespace(rejection_sample_method=method)
    return engine.RejectionSampler(Sampler(), config, torch.device("cpu"))


def accepted_of(tokens: Tensor) -> Tensor:
    return (tokens >= 0).sum(dim=1) - 1


def test_block_verification_accepts_what_its_paper_says() -> None:
    """Its example: two tokens, p = (1/3, 2/3) and q = (2/3, 1/3), two drafts; 11/9 instead of 10/9."""
    n = 30_000
    p, q = torch.full((VOCAB_SIZE,), -math.inf), torch.zeros(VOCAB_SIZE)
    p[:2], q[:2] = torch.tensor([1 / 3, 2 / 3]).log(), torch.tensor([2 / 3, 1 / 3])
    drafts = torch.multinomial(q, 2 * n, replacement=True).view(n, 2)
    for method, mean in (("block", 11 / 9), ("standard", 10 / 9)):
        out = run(
            drafts.tolist(),
            p.repeat(3 * n, 1),
            sampling([1.0] * n),
            q.repeat(2 * n, 1),
            block_sampler(method),
        )
        accepted = accepted_of(out.sampled_token_ids).double()
        assert float(accepted.mean()) == pytest.approx(mean, abs=5 * float(accepted.std()) / n**0.5)


@pytest.mark.parametrize("filters", [{}, {"top_k": 3}, {"top_p": 0.7}, {"top_k": 3, "top_p": 0.9}], ids=str)
@pytest.mark.parametrize("drafter", ["n-gram", "draft model"])
def test_block_verification_follows_the_law(drafter: str, filters: dict[str, float]) -> None:
    """Of three tokens, each dependent on those before it; what a step leaves is drawn after it."""
    n, size, temperature = 30_000, 4, 0.8
    generator = torch.Generator().manual_seed(3)
    shapes = [(size,), (size, size), (size, size, size)]
    target = [torch.randn(*shape, generator=generator) for shape in shapes]
    draft = [(t + 0.7 * torch.randn(t.shape, generator=generator)).softmax(-1) for t in target[:2]]
    if drafter == "n-gram":
        draft = [torch.nn.functional.one_hot(t.argmax(-1), size).float() for t in target[:2]]
    first = torch.multinomial(draft[0], n, replacement=True)
    second = torch.multinomial(draft[1][first], 1).squeeze(1)
    wide = torch.full((n, 3, VOCAB_SIZE), -math.inf)
    wide[:, 0, :size], wide[:, 1, :size], wide[:, 2, :size] = (
        target[0],
        target[1][first],
        target[2][first, second],
    )
    probs = None
    if drafter == "draft model":
        probs = torch.zeros(n, 2, VOCAB_SIZE)
        probs[:, 0, :size], probs[:, 1, :size] = draft[0], draft[1][first]
        probs = probs.view(2 * n, VOCAB_SIZE)
    more: dict[str, Any] = {
        name: torch.full((n,), value, dtype=INT32 if name == "top_k" else torch.float32)
        for name, value in filters.items()
    }
    drafts = torch.stack([first, second], dim=1).tolist()
    metadata = sampling([temperature] * n, **more)
    out = run(drafts, wide.view(3 * n, VOCAB_SIZE), metadata, probs, block_sampler())
    tokens = out.sampled_token_ids.long()

    def law(logits: Tensor) -> Tensor:
        flat = logits.reshape(-1, size) / temperature
        if "top_k" in filters:
            flat = flat.where(flat >= flat.topk(3, dim=-1).values[:, -1:], -math.inf)
        if "top_p" in filters:
            ordered, ids = flat.softmax(-1).sort(descending=True)
            out_of = torch.zeros_like(flat, dtype=torch.bool)
            out_of.scatter_(1, ids, ordered.cumsum(-1) - ordered >= filters["top_p"])
            flat = flat.masked_fill(out_of, -math.inf)
        return flat.double().softmax(-1).view(logits.shape)

    laws = [law(logits) for logits in target]
    for slot in (1, 2):
        missing = tokens[:, slot] < 0
        before = tokens[missing, :slot].unbind(1)
        tokens[missing, slot] = torch.multinomial(laws[slot][before], 1).squeeze(1)
    joint = laws[0][:, None, None] * laws[1][:, :, None] * laws[2]
    counts = torch.zeros(shapes[2]).index_put_(tokens.unbind(1), torch.ones(n), accumulate=True)
    possible = joint.flatten() > 0
    assert not counts.flatten()[~possible].any()
    assert p_value(counts.flatten()[possible].long(), joint.flatten()[possible]) > ALARM
    # The test can fail: drafts by other laws than those that were told.
    if probs is not None:
        lied = run(drafts, wide.view(3 * n, VOCAB_SIZE), metadata, probs.roll(1, 0), block_sampler())
        first = torch.bincount(lied.sampled_token_ids[:, 0], minlength=size)[:size]
        likely = laws[0] > 0
        assert p_value(first[likely], laws[0][likely]) < ALARM


@pytest.mark.parametrize("temperature", [[0.0] * 4, [0.0, 1.0, 0.0, 0.7]], ids=["greedy", "mixed"])
def test_block_verification_judges_greedy_requests_alike(temperature: list[float]) -> None:
    drafts = [[4, 4, 4], [1], [], [2, 3]]
    logits = rows(drafts)
    tokens = run(drafts, logits, sampling(temperature), sampler=block_sampler()).sampled_token_ids
    greedy = torch.tensor(temperature) == 0
    assert torch.equal(tokens[greedy], stock(drafts, logits, sampling([0.0] * 4)).sampled_token_ids[greedy])


def test_the_engine_has_no_block_verification_here() -> None:
    """Nor in 0.33: its newer runner alone has. It takes the method for "standard", with greedy drafts."""
    from vllm.config import speculative
    from vllm.v1.spec_decode import llm_base_proposer

    assert "block" in speculative.RejectionSampleMethod.__args__
    for function in (engine.rejection_sample, _plugin._stock(engine, "rejection_sample")):
        assert not any("block" in name for name in inspect.signature(function).parameters)
    stock_init = _plugin._stock(llm_base_proposer.SpecDecodeBaseProposer, "__init__")
    assert '"block"' not in inspect.getsource(stock_init)
