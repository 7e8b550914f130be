"""verify_chain and sample on what engines keep for more requests than are in a batch."""

from __future__ import annotations

from typing import Any

import inputs
import margins
import pytest
import torch
from implementations import Implementation
from specdec_ops import Status
from specdec_ops.ops import sample, verify_chain
from torch import Tensor
from torch._subclasses import FakeTensorMode

EXTRAS = {"return_logsumexp": True, "return_logprobs": True, "return_accept_probs": True}
#: Out of order, one of them twice, and two requests without drafts.
INDICES, COUNTS = [6, 2, 5, 0, 6, 8, 3, 1], [2, 0, 4, 1, 3, 4, 0, 4]
OPTIONS: dict[str, dict[str, Any]] = {
    "token": {},
    "synthetic": {"accept_rates": torch.tensor([0.8, 0.6, 0.4, 0.7])},
    "fly": {"fly_window_size": 1, "fly_entropy_threshold": 0.1},
    "bonus_token_ids": {"bonus_token_ids": torch.arange(len(INDICES))},
}


def entries(draft_law: str, **options: Any) -> inputs.Entries:
    shape = {"indices": INDICES, "counts": COUNTS, "max_requests": 10, "k": 4}
    return inputs.entries(draft_law, **{**shape, **options})


def assert_same(implementation: Implementation, kept: inputs.Arguments, gathered: inputs.Arguments) -> None:
    out = implementation.verify_chain(**kept, **EXTRAS)
    expected = implementation.verify_chain(**gathered, **EXTRAS)
    for name, value in expected._asdict().items():
        assert margins.same_bits(getattr(out, name), value), name


@pytest.mark.parametrize("uniforms", [False, True], ids=["seeds", "uniforms"])
@pytest.mark.parametrize("draft_law", inputs.DRAFT_LAWS)
def test_equals_gathered_arguments(implementation: Implementation, draft_law: str, uniforms: bool) -> None:
    """Whatever is in entries and slots that nobody refers to."""
    for seed in range(4):
        kept, gathered = entries(draft_law, seed=seed, uniforms=uniforms)
        assert_same(implementation, kept, gathered)
    num_accepted = implementation.verify_chain(**gathered).num_accepted
    assert num_accepted.max() > 0 and (num_accepted < torch.tensor(COUNTS)).any()


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("draft_law", inputs.DRAFT_LAWS)
def test_equals_gathered_arguments_under_every_rule(
    native: Implementation, draft_law: str, option: str
) -> None:
    kept, gathered = entries(draft_law, seed=1)
    if option == "bonus_token_ids":
        bonus_token_ids = OPTIONS[option]["bonus_token_ids"]
        kept, gathered = (inputs.without_bonus_rows(given, bonus_token_ids) for given in (kept, gathered))
    assert_same(native, kept | OPTIONS[option], gathered | OPTIONS[option])


def apart(values: Tensor, order: tuple[int, ...]) -> Tensor:
    """The same values in a wider buffer whose dimensions lie in another order."""
    shape = [values.shape[d] + 3 for d in order]
    buffer = torch.full(shape, 7, dtype=values.dtype)
    view = buffer.permute([order.index(d) for d in range(values.dim())])
    view = view[tuple(slice(2, 2 + size) for size in values.shape)]
    view.copy_(values)
    return view


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2)], ids=["by entry", "by slot"])
@pytest.mark.parametrize("draft_law", inputs.DRAFT_LAWS)
def test_entries_and_slots_have_any_strides(
    implementation: Implementation, draft_law: str, order: tuple[int, ...]
) -> None:
    kept, gathered = entries(draft_law, seed=2)
    for name in set(kept) & {*inputs.KEPT, *inputs.KEPT_BY_SLOT}:
        kept[name] = apart(kept[name], order[: kept[name].dim()] if kept[name].dim() > 1 else (0,))
    kept["request_indices"] = apart(kept["request_indices"][:, None].expand(-1, 2), (0, 1))[:, 1]
    assert not kept["request_indices"].is_contiguous()
    assert_same(implementation, kept, gathered)


@pytest.mark.parametrize("draft_law", [law for law in inputs.DRAFT_LAWS if law != "one_hot"])
def test_rows_by_slot_need_no_indices(implementation: Implementation, draft_law: str) -> None:
    order = list(range(len(COUNTS)))
    kept, gathered = entries(draft_law, indices=order, max_requests=len(COUNTS), seed=3)
    del kept["request_indices"]
    assert_same(implementation, kept, gathered)


@pytest.mark.parametrize("by_draft", ["draft_logits", "draft_logsumexp"])
def test_either_of_logits_and_logsumexp_may_be_by_draft(
    implementation: Implementation, by_draft: str
) -> None:
    kept, gathered = entries("logits_and_logsumexp", seed=4)
    kept[by_draft] = gathered[by_draft]
    assert_same(implementation, kept, gathered)


@pytest.mark.parametrize("draft_law", inputs.DRAFT_LAWS)
def test_laws_may_be_by_draft(implementation: Implementation, draft_law: str) -> None:
    kept, gathered = entries(draft_law, seed=5, index_dtype=torch.int32)
    kept |= {name: value for name, value in gathered.items() if name in inputs.KEPT_BY_SLOT}
    assert_same(implementation, kept, gathered)


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("name", ["temperature", "draft_temperature", "seeds"])
def test_numbers_count_for_every_entry(
    implementation: Implementation, name: str, index_dtype: torch.dtype
) -> None:
    kept, gathered = entries("logits", seed=6, index_dtype=index_dtype)
    number = 9 if name == "seeds" else 0.75
    assert_same(implementation, kept | {name: number}, gathered | {name: number})


def test_only_the_draft_law_tells_how_many_entries_there_are(implementation: Implementation) -> None:
    kept, gathered = entries("logits", seed=7)
    numbers = {"temperature": 0.9, "draft_temperature": 1.1, "seeds": 3, "has_draft_law": None}
    assert_same(implementation, kept | numbers, gathered | numbers)


def test_greedy_requests_need_no_random_numbers(implementation: Implementation) -> None:
    """Entries that nobody refers to may sample."""
    kept, gathered = entries("one_hot", indices=[1, 6, 1], counts=[4, 2, 0])
    kept["temperature"][[0, 2]] = 1.0
    none = {"seeds": None, "positions": None}
    assert (gathered["temperature"] == 0).all()
    assert_same(implementation, kept | none, gathered | none)


def test_more_slots_than_drafts(implementation: Implementation) -> None:
    kept, gathered = entries("logits", counts=[2, 0, 2, 1, 0, 1, 0, 2], seed=8)
    assert_same(implementation, kept | {"max_num_draft_tokens": 2}, gathered | {"max_num_draft_tokens": 2})


def test_no_requests_and_no_drafts(implementation: Implementation) -> None:
    for counts in ([], [0, 0]):
        for max_requests in (0, 5) if not counts else (5,):
            out = implementation.verify_chain(
                torch.zeros(len(counts), 4),
                torch.zeros(0, dtype=torch.int64),
                torch.zeros(len(counts) + 1, dtype=torch.int64),
                temperature=torch.zeros(max_requests),
                draft_logits=torch.zeros(max_requests, 3, 4),
                request_indices=torch.tensor([4, 0][: len(counts)], dtype=torch.int32),
                max_num_draft_tokens=3,
            )
            assert out.token_ids.tolist() == [[0, -1, -1, -1]] * len(counts)


def rows(seed: int, indices: list[int], max_requests: int = 10) -> inputs.Arguments:
    random = inputs.generator(seed)
    return {
        "logits": 2 * torch.randn(len(indices), 300, generator=random),
        "temperature": torch.tensor([0.7, 0.0, 1.2, 1.0, 0.4]).repeat(max_requests)[:max_requests],
        "seeds": torch.randint(-(2**63), 2**63 - 1, (max_requests,), generator=random),
        "positions": torch.randint(0, 2**40, (len(indices),), generator=random),
        "request_indices": torch.tensor(indices),
    }


def gathered_rows(kept: inputs.Arguments) -> inputs.Arguments:
    entries = kept["request_indices"].long()
    chosen = {name: kept[name][entries.clamp(min=0)] for name in ("temperature", "seeds")}
    chosen["temperature"] = chosen["temperature"].masked_fill(entries < 0, 0.0)
    return {name: value for name, value in {**kept, **chosen}.items() if name != "request_indices"}


@pytest.mark.parametrize("draft_slot", [None, 3])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
def test_rows_to_sample_equal_gathered_ones(
    implementation: Implementation, index_dtype: torch.dtype, draft_slot: int | None
) -> None:
    for seed in range(4):
        kept = rows(seed, [6, 2, -1, 0, 6, 8, -1, 7]) | {"draft_slot": draft_slot}
        kept["request_indices"] = kept["request_indices"].to(index_dtype)
        # Nobody refers to these, nor to the last entry.
        kept["temperature"][[1, 3, 9]] = torch.nan
        expected = implementation.sample(**gathered_rows(kept))
        assert margins.all_same_bits(implementation.sample(**kept), expected)


def test_rows_of_no_request_are_greedy(implementation: Implementation) -> None:
    logits = torch.tensor([[0.0, 1.0, 0.5], [float("nan"), 2.0, 3.0]])
    for arguments in (
        {"temperature": 1.0, "seeds": 5, "positions": torch.tensor([1, 2])},
        # Without random numbers too.
        {"temperature": torch.ones(1)},
    ):
        out = implementation.sample(logits, **arguments, request_indices=torch.tensor([-1, -1]))
        assert out.token_ids.tolist() == [1, 2]
        assert out.status.tolist() == [Status.OK, Status.NON_FINITE_TARGET]
        assert out.logsumexp[0].item() == pytest.approx(logits[0].double().logsumexp(0).item(), abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_draft_slots_in_a_tensor(implementation: Implementation, dtype: torch.dtype) -> None:
    kept = rows(0, [6, 2, 0, 5, 8])
    slots = [4, 0, 2**31 - 1, 1, 4]
    each = [implementation.sample(**kept, draft_slot=slot) for slot in slots]
    one = implementation.sample(**kept, draft_slot=torch.tensor(4, dtype=dtype))
    assert margins.all_same_bits(one, each[0])
    column = torch.tensor([[slot, 3] for slot in slots], dtype=dtype)[:, 0]
    own = implementation.sample(**kept, draft_slot=column)
    for t, expected in enumerate(each):
        assert margins.all_same_bits(
            *([value[t] for value in out if value is not None] for out in (own, expected))
        )
    assert len({tuple(out.token_ids.tolist()) for out in each}) > 1


def test_slots_of_rows_of_no_request_are_not_looked_at(implementation: Implementation) -> None:
    kept = rows(1, [6, -1, 0])
    expected = implementation.sample(**kept, draft_slot=2)
    out = implementation.sample(**kept, draft_slot=torch.tensor([2, -9, 2]))
    assert margins.all_same_bits(out, expected)


def test_shapes_are_known_without_running() -> None:
    kept, _ = entries("logits_and_logsumexp")
    with FakeTensorMode() as mode:
        fake = {
            name: mode.from_tensor(value) if isinstance(value, Tensor) else value
            for name, value in kept.items()
        }
        shapes = verify_chain.verify_chain(**fake, **EXTRAS)
    for name, value in verify_chain.verify_chain(**kept, **EXTRAS)._asdict().items():
        assert (getattr(shapes, name).shape, getattr(shapes, name).dtype) == (value.shape, value.dtype), name


def test_opcheck() -> None:
    for draft_law in ("logits_and_logsumexp", "support"):
        kept, _ = entries(draft_law)
        names = (
            "target_logits",
            "draft_token_ids",
            "cu_num_draft_tokens",
            "temperature",
            "max_num_draft_tokens",
        )
        torch.library.opcheck(verify_chain._op, tuple(kept.pop(name) for name in names), kept)
    kept = rows(0, [3, -1])
    kept["draft_slots"] = torch.tensor(1)
    torch.library.opcheck(sample._op, (kept.pop("logits"), kept.pop("temperature")), kept)


def test_compiled_calls_give_the_same() -> None:
    kept, _ = entries("logits_and_logsumexp")
    compiled = torch.compile(verify_chain.verify_chain, fullgraph=True, backend="aot_eager")
    assert margins.all_same_bits(compiled(**kept)[:3], verify_chain.verify_chain(**kept)[:3])
    drawn = rows(0, [3, -1, 5])
    compiled = torch.compile(sample.sample, fullgraph=True, backend="aot_eager")
    for slot in (torch.tensor(1), torch.tensor([0, 1, 2])):
        assert margins.all_same_bits(
            compiled(**drawn, draft_slot=slot), sample.sample(**drawn, draft_slot=slot)
        )
