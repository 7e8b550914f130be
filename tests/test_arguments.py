"""What each op says of a bad argument: ``<op>: <argument> must be <expectation>, got <actual>``."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import inputs
import pytest
import torch
from implementations import Implementation

F32, F64, I32, I64 = torch.float32, torch.float64, torch.int32, torch.int64
NAN = float("nan")
Arguments = dict[str, Any]


def chain_arguments() -> Arguments:
    """Two requests with two drafts and one, five columns."""
    return {
        "target_logits": torch.zeros(5, 5),
        "draft_token_ids": torch.zeros(3, dtype=I64),
        "cu_num_draft_tokens": torch.tensor([0, 2, 3]),
        "seeds": torch.zeros(2, dtype=I64),
        "positions": torch.zeros(2, dtype=I64),
    }


def sample_arguments() -> Arguments:
    return {
        "logits": torch.zeros(2, 5),
        "seeds": torch.zeros(2, dtype=I64),
        "positions": torch.zeros(2, dtype=I64),
    }


def recovered_arguments() -> Arguments:
    return {
        "target_logits": torch.zeros(3, 5),
        "draft_token_ids": torch.zeros(3, dtype=I64),
        "seeds": torch.zeros(3, dtype=I64),
        "positions": torch.zeros(3, dtype=I64),
    }


SUPPORT = {"draft_support_ids": torch.zeros(3, 2, dtype=I64), "draft_support_logprobs": torch.zeros(3, 2)}
ROWS = "float32, bfloat16 or float16, got"
REAL = "float32 or float64, got"
INTEGER = "int32 or int64, got"


def uniforms(accept: Any, recovered: Any) -> Arguments:
    return {"seeds": None, "positions": None, "accept_uniforms": accept, "recovered_uniforms": recovered}


def with_bonus(bonus_token_ids: torch.Tensor) -> Arguments:
    return {"target_logits": torch.zeros(3, 5), "bonus_token_ids": bonus_token_ids}


def with_entries(indices: list[int] | torch.Tensor, **change: Any) -> Arguments:
    """The two requests, or rows, among seven."""
    kept = {"temperature": torch.ones(7), "seeds": torch.zeros(7, dtype=I64)}
    return kept | {"request_indices": torch.as_tensor(indices)} | change


def entries_cases(least: int, request: str) -> list[tuple[Arguments, str]]:
    of_all = "[max_requests] with 7 elements, got shape"
    outside = f"request_indices must be in [{least}, 7), got"
    return [
        (with_entries(torch.zeros(2)), f"request_indices must be {INTEGER} float32"),
        (with_entries([0]), "request_indices must be [batch] with 2 elements, got shape [1]"),
        (with_entries([[0, 1]]), "request_indices must be [batch] with 2 elements, got shape [1, 2]"),
        (with_entries([0, 7]), f"{outside} 7 for {request} 1"),
        (with_entries([least - 1, 6]), f"{outside} {least - 1} for {request} 0"),
        (with_entries([3, 2**32 + 3]), f"{outside} 4294967299 for {request} 1"),
        (with_entries([0, 1], seeds=torch.zeros(2, dtype=I64)), f"seeds must be {of_all} [2]"),
        (with_entries([0, 1], positions=torch.zeros(7, dtype=I64)), "positions must be [batch] with 2 elem"),
        (
            with_entries([0, 1], temperature=torch.ones(0), seeds=torch.zeros(0, dtype=I64)),
            "temperature must be [max_requests] with at least one element, got shape [0]",
        ),
        (
            with_entries([0, 1], temperature=torch.ones(7, 1)),
            "temperature must be [max_requests] with at least one element, got shape [7, 1]",
        ),
        (
            with_entries([0, 1], temperature=torch.ones(7, dtype=F64)),
            "temperature must be float32, got float",
        ),
        # Numbers alone have no other entries than the batch's.
        (
            {"temperature": 1.0, "seeds": 1, "request_indices": torch.tensor([0, 2])},
            f"request_indices must be in [{least}, 2), got 2 for {request} 1",
        ),
    ]


def draft_entries_cases() -> list[tuple[Arguments, str]]:
    """Draft laws that lie in entries, of the 7 requests or of the 2 of the batch."""
    cases: list[tuple[Arguments, str]] = []
    wide = "with max_requests = 7 and k at least max_num_draft_tokens = 2, got shape"
    own = "with max_requests = 2 and k at least max_num_draft_tokens = 2, got shape"
    for name in ("draft_logits", "draft_probs"):
        shape = f"{name} must be [max_requests, k, width]"
        cases += [
            (with_entries([0, 1], **{name: torch.zeros(6, 2, 5)}), f"{shape} {wide} [6, 2, 5]"),
            (with_entries([0, 1], **{name: torch.zeros(7, 1, 5)}), f"{shape} {wide} [7, 1, 5]"),
            ({name: torch.zeros(7, 2, 5)}, f"{shape} {own} [7, 2, 5]"),
            ({name: torch.zeros(2, 2, 4)}, f"{name} must have at least vocab_size = 5 columns, got 4"),
            ({name: torch.zeros(2, 2, 5, dtype=F64)}, f"{name} must be {ROWS} float64"),
            (
                {name: torch.zeros(2, 5, 2).transpose(1, 2)},
                f"{name} must have a contiguous last dimension, got stride 2",
            ),
        ]
    logits = {"draft_logits": torch.zeros(7, 2, 5)}
    logsumexp = "draft_logsumexp must be [max_requests, k]"
    ids, logprobs = torch.zeros(7, 2, 3, dtype=I64), torch.zeros(7, 2, 3)
    support_shape = "draft_support_logprobs must have the shape of draft_support_ids, shape [7, 2, 3]"
    return [
        *cases,
        (with_entries([0, 1], **logits, draft_logsumexp=torch.zeros(2, 2)), f"{logsumexp} {wide} [2, 2]"),
        (with_entries([0, 1], **logits, draft_logsumexp=torch.zeros(7, 1)), f"{logsumexp} {wide} [7, 1]"),
        (
            with_entries([0, 1], **logits, draft_logsumexp=torch.zeros(2)),
            "draft_logsumexp must be [num_drafts] with 3 elements, got shape [2]",
        ),
        (
            with_entries([0, 1], draft_support_ids=ids[:5], draft_support_logprobs=logprobs),
            f"draft_support_ids must be [max_requests, k, support] {wide} [5, 2, 3]",
        ),
        (
            with_entries([0, 1], draft_support_ids=ids, draft_support_logprobs=logprobs[0]),
            f"{support_shape}, got shape [2, 3]",
        ),
        (
            with_entries([0, 1], draft_temperature=torch.ones(2)),
            "draft_temperature must be [max_requests] with 7 elements, got shape [2]",
        ),
        (
            with_entries([0, 1], has_draft_law=torch.ones(2, dtype=torch.bool)),
            "has_draft_law must be [max_requests] with 7 elements, got shape [2]",
        ),
    ]


def draft_law_cases(requests: str, num_requests: int) -> list[tuple[Arguments, str]]:
    elements = f"{requests} with {num_requests} elements, got shape [1]"
    return [
        ({"draft_logits": torch.zeros(3, 5, dtype=F64)}, f"draft_logits must be {ROWS} float64"),
        ({"draft_logits": torch.zeros(15)}, "draft_logits must be [num_drafts, width], got shape [15]"),
        (
            {"draft_logits": torch.zeros(4, 5)},
            "draft_logits must be [num_drafts, width] with 3 rows, got shape [4, 5]",
        ),
        (
            {"draft_logits": torch.zeros(5, 3).t()},
            "draft_logits must have a contiguous last dimension, got stride 3",
        ),
        (
            {"draft_logits": torch.zeros(3, 4)},
            "draft_logits must have at least vocab_size = 5 columns, got 4",
        ),
        ({"draft_probs": torch.zeros(3, 5, dtype=I64)}, f"draft_probs must be {ROWS} int64"),
        (
            {"draft_probs": torch.zeros(2, 5)},
            "draft_probs must be [num_drafts, width] with 3 rows, got shape [2, 5]",
        ),
        ({"draft_probs": torch.zeros(3, 4)}, "draft_probs must have at least vocab_size = 5 columns, got 4"),
        (
            {"draft_logits": torch.zeros(3, 5), "draft_logsumexp": torch.zeros(3, dtype=torch.float16)},
            f"draft_logsumexp must be {REAL} float16",
        ),
        (
            {"draft_logits": torch.zeros(3, 5), "draft_logsumexp": torch.zeros(2)},
            "draft_logsumexp must be [num_drafts] with 3 elements, got shape [2]",
        ),
        (
            {"draft_logsumexp": torch.zeros(3)},
            "draft_logsumexp must be given with draft_logits, got it alone",
        ),
        (
            {"draft_probs": torch.zeros(3, 5), "draft_logsumexp": torch.zeros(3)},
            "draft_logsumexp must be given with draft_logits, got it alone",
        ),
        (
            {"draft_logits": torch.zeros(3, 5), "draft_probs": torch.zeros(3, 5)},
            "draft_logits, draft_probs and draft_support_ids must be at most one, got several",
        ),
        (
            {"draft_logits": torch.zeros(3, 5), **SUPPORT},
            "draft_logits, draft_probs and draft_support_ids must be at most one, got several",
        ),
        (
            {"draft_support_ids": SUPPORT["draft_support_ids"]},
            "draft_support_ids and draft_support_logprobs must be given together, got one",
        ),
        (
            {"draft_support_logprobs": SUPPORT["draft_support_logprobs"]},
            "draft_support_ids and draft_support_logprobs must be given together, got one",
        ),
        ({**SUPPORT, "draft_support_ids": torch.zeros(3, 2)}, f"draft_support_ids must be {INTEGER} float32"),
        (
            {**SUPPORT, "draft_support_ids": torch.zeros(2, 2, dtype=I64)},
            "draft_support_ids must be [num_drafts, support] with 3 rows, got shape [2, 2]",
        ),
        (
            {**SUPPORT, "draft_support_logprobs": torch.zeros(3, 2, dtype=F64)},
            "draft_support_logprobs must be float32, got float64",
        ),
        (
            {**SUPPORT, "draft_support_logprobs": torch.zeros(3, 3)},
            "draft_support_logprobs must have the shape of draft_support_ids, shape [3, 2], got shape [3, 3]",
        ),
        (
            {"draft_temperature": torch.zeros(num_requests, dtype=F64)},
            "draft_temperature must be float32, got float64",
        ),
        ({"draft_temperature": torch.zeros(1)}, f"draft_temperature must be {elements}"),
        ({"has_draft_law": torch.zeros(num_requests, dtype=I32)}, "has_draft_law must be bool, got int32"),
        ({"has_draft_law": torch.zeros(1, dtype=torch.bool)}, f"has_draft_law must be {elements}"),
    ]


def common_cases(requests: str, num_requests: int, logits: str) -> list[tuple[Arguments, str]]:
    """B13: per-token tensors where one value a request is due name both sizes."""
    elements = f"{requests} with {num_requests} elements, got shape [7]"
    return [
        ({"temperature": torch.ones(num_requests, dtype=F64)}, "temperature must be float32, got float64"),
        ({"temperature": torch.ones(7)}, f"temperature must be {elements}"),
        (
            {"temperature": torch.ones(num_requests, 1)},
            f"temperature must be {requests} with {num_requests} elements, got shape [{num_requests}, 1]",
        ),
        ({"seeds": torch.zeros(num_requests, dtype=I32)}, "seeds must be int64, got int32"),
        ({"seeds": torch.zeros(7, dtype=I64)}, f"seeds must be {elements}"),
        ({"positions": torch.zeros(num_requests)}, f"positions must be {INTEGER} float32"),
        ({"positions": torch.zeros(7, dtype=I64)}, f"positions must be {elements}"),
        ({"positions": None}, "seeds and positions must be given together, got one"),
        ({"seeds": None}, "seeds and positions must be given together, got one"),
        ({"vocab_size": 0}, f"vocab_size must be between 1 and the width of {logits}, 5, got 0"),
        ({"vocab_size": -3}, f"vocab_size must be between 1 and the width of {logits}, 5, got -3"),
        ({"vocab_size": 6}, f"vocab_size must be between 1 and the width of {logits}, 5, got 6"),
    ]


def uniform_cases(requests: str, num_requests: int) -> list[tuple[Arguments, str]]:
    def alone(value: torch.Tensor) -> Arguments:
        return {"seeds": None, "positions": None, "uniforms": value}

    return [
        (alone(torch.zeros(num_requests, dtype=torch.bfloat16)), f"uniforms must be {REAL} bfloat16"),
        (alone(torch.zeros(7)), f"uniforms must be {requests} with {num_requests} elements, got shape [7]"),
        (alone(torch.tensor([0.5, 1.0, 0.0][:num_requests])), "uniforms must be in [0, 1), got 1 at index 1"),
        (
            alone(torch.tensor([0.5, NAN, 0.0][:num_requests])),
            "uniforms must be in [0, 1), got nan at index 1",
        ),
        (
            alone(torch.tensor([-0.5, 0.0, 0.0][:num_requests])),
            "uniforms must be in [0, 1), got -0.5 at index 0",
        ),
        ({"uniforms": torch.zeros(num_requests)}, "seeds and uniforms must be at most one, got both"),
        (
            {"seeds": None, "positions": None},
            "seeds and positions, or uniforms, must be given unless every row is greedy, got neither",
        ),
    ]


VERIFY_CHAIN_CASES = [
    ({"draft_token_ids": torch.zeros(3)}, f"draft_token_ids must be {INTEGER} float32"),
    (
        {"draft_token_ids": torch.zeros(3, 1, dtype=I64)},
        "draft_token_ids must be [num_drafts], got shape [3, 1]",
    ),
    ({"cu_num_draft_tokens": torch.zeros(3)}, f"cu_num_draft_tokens must be {INTEGER} float32"),
    (
        {"cu_num_draft_tokens": torch.zeros(3, 1, dtype=I64)},
        "cu_num_draft_tokens must be [batch + 1], got shape [3, 1]",
    ),
    (
        {"cu_num_draft_tokens": torch.zeros(0, dtype=I64)},
        "cu_num_draft_tokens must be [batch + 1], got shape [0]",
    ),
    ({"cu_num_draft_tokens": torch.tensor([1, 2, 3])}, "cu_num_draft_tokens must start with 0, got 1"),
    (
        {"cu_num_draft_tokens": torch.tensor([0, 4, 3])},
        "cu_num_draft_tokens must not decrease, got 4 before 3 at index 2",
    ),
    (
        {"cu_num_draft_tokens": torch.tensor([0, 2, 2])},
        "cu_num_draft_tokens must end with num_drafts = 3, got 2",
    ),
    (
        {"cu_num_draft_tokens": torch.tensor([0, 2, 4])},
        "cu_num_draft_tokens must end with num_drafts = 3, got 4",
    ),
    (
        {"max_num_draft_tokens": 1},
        "max_num_draft_tokens must be at least the largest count, got 1 for a request with 2 drafts",
    ),
    ({"max_num_draft_tokens": -1}, "max_num_draft_tokens must be in [0, 2^31 - 1), got -1"),
    (
        {"max_num_draft_tokens": 2**63 - 1},
        "max_num_draft_tokens must be in [0, 2^31 - 1), got 9223372036854775807",
    ),
    ({"target_logits": torch.zeros(5, 5, dtype=F64)}, f"target_logits must be {ROWS} float64"),
    ({"target_logits": torch.zeros(25)}, "target_logits must be [num_drafts + batch, width], got shape [25]"),
    (
        {"target_logits": torch.zeros(3, 5)},
        "target_logits must be [num_drafts + batch, width] with 5 rows, got shape [3, 5]",
    ),
    (
        {"target_logits": torch.zeros(5, 10)[:, ::2]},
        "target_logits must have a contiguous last dimension, got stride 2",
    ),
    ({"target_logits": torch.zeros(5, 0)}, "target_logits must have at least one column, got shape [5, 0]"),
    *common_cases("[batch]", 2, "target_logits"),
    *draft_law_cases("[batch]", 2),
    *entries_cases(0, "request"),
    *draft_entries_cases(),
    (
        uniforms(torch.zeros(3), None),
        "accept_uniforms and recovered_uniforms must be given together, got one",
    ),
    (
        uniforms(None, torch.zeros(2)),
        "accept_uniforms and recovered_uniforms must be given together, got one",
    ),
    (
        {"accept_uniforms": torch.zeros(3), "recovered_uniforms": torch.zeros(2)},
        "seeds and accept_uniforms must be at most one, got both",
    ),
    (
        uniforms(torch.zeros(3, dtype=torch.float16), torch.zeros(2)),
        f"accept_uniforms must be {REAL} float16",
    ),
    (
        uniforms(torch.zeros(2), torch.zeros(2)),
        "accept_uniforms must be [num_drafts] with 3 elements, got shape [2]",
    ),
    (
        uniforms(torch.zeros(3), torch.zeros(3)),
        "recovered_uniforms must be [batch] with 2 elements, got shape [3]",
    ),
    (uniforms(torch.zeros(3), torch.zeros(2, dtype=I64)), f"recovered_uniforms must be {REAL} int64"),
    (
        uniforms(torch.tensor([0.0, 1.0, 0.0]), torch.zeros(2)),
        "accept_uniforms must be in [0, 1), got 1 at index 1",
    ),
    (
        uniforms(torch.zeros(3), torch.tensor([0.0, -0.25])),
        "recovered_uniforms must be in [0, 1), got -0.25 at index 1",
    ),
    (
        uniforms(torch.zeros(3), torch.tensor([0.0, NAN])),
        "recovered_uniforms must be in [0, 1), got nan at index 1",
    ),
    (
        {"seeds": None, "positions": None},
        "seeds and positions, or accept_uniforms and recovered_uniforms, must be given unless every "
        "request is greedy, got neither",
    ),
    (
        {"seeds": None, "positions": None, "temperature": torch.zeros(2), "accept_rates": torch.ones(2)},
        "seeds and positions, or accept_uniforms and recovered_uniforms, must be given with accept_rates, "
        "got neither",
    ),
    (with_bonus(torch.zeros(2)), f"bonus_token_ids must be {INTEGER} float32"),
    (
        with_bonus(torch.zeros(3, dtype=I64)),
        "bonus_token_ids must be [batch] with 2 elements, got shape [3]",
    ),
    (
        with_bonus(torch.zeros(2, 1, dtype=I64)),
        "bonus_token_ids must be [batch] with 2 elements, got shape [2, 1]",
    ),
    (
        {"bonus_token_ids": torch.zeros(2, dtype=I64)},
        "target_logits must be [num_drafts, width] with 3 rows, got shape [5, 5]",
    ),
    ({"accept_rates": torch.ones(2, dtype=torch.float16)}, f"accept_rates must be {REAL} float16"),
    (
        {"accept_rates": torch.ones(1)},
        "accept_rates must be [slots] with at least max_num_draft_tokens = 2 elements, got shape [1]",
    ),
    (
        {"accept_rates": torch.ones(3), "max_num_draft_tokens": 4},
        "accept_rates must be [slots] with at least max_num_draft_tokens = 4 elements, got shape [3]",
    ),
    (
        {"accept_rates": torch.ones(2, 2)},
        "accept_rates must be [slots] with at least max_num_draft_tokens = 2 elements, got shape [2, 2]",
    ),
    ({"accept_rates": torch.tensor([0.5, 1.5])}, "accept_rates must be in [0, 1], got 1.5 at index 1"),
    ({"accept_rates": torch.tensor([-0.5, 1.0])}, "accept_rates must be in [0, 1], got -0.5 at index 0"),
    ({"accept_rates": torch.tensor([0.5, 0.5, NAN])}, "accept_rates must be in [0, 1], got nan at index 2"),
    (
        {"accept_rates": torch.ones(2), "fly_window_size": 1},
        "accept_rates and fly_window_size must be at most one, got both",
    ),
    ({"fly_window_size": 0}, "fly_window_size must be at least 1, got 0"),
    ({"fly_window_size": -2}, "fly_window_size must be at least 1, got -2"),
    (
        {"fly_window_size": 1, "fly_entropy_threshold": -0.5},
        "fly_entropy_threshold must be at least 0, got -0.5",
    ),
    (
        {"fly_window_size": 1, "fly_entropy_threshold": NAN},
        "fly_entropy_threshold must be at least 0, got nan",
    ),
    ({"fly_window_size": 1, "fly_entropy_top_k": 0}, "fly_entropy_top_k must be in [1, 64], got 0"),
    ({"fly_window_size": 1, "fly_entropy_top_k": 65}, "fly_entropy_top_k must be in [1, 64], got 65"),
]
SAMPLE_CASES = [
    ({"logits": torch.zeros(2, 5, dtype=I64)}, f"logits must be {ROWS} int64"),
    ({"logits": torch.zeros(2, 5, 1)}, "logits must be [batch, width], got shape [2, 5, 1]"),
    ({"logits": torch.zeros(5, 2).t()}, "logits must have a contiguous last dimension, got stride 2"),
    ({"logits": torch.zeros(2, 0)}, "logits must have at least one column, got shape [2, 0]"),
    (
        {"draft_slot": 0, "seeds": None, "positions": None, "uniforms": torch.zeros(2)},
        "draft_slot and uniforms must be at most one, got both",
    ),
    ({"draft_slot": -1}, "draft_slot must be in [0, 2^31), got -1"),
    ({"draft_slot": 2**31}, "draft_slot must be in [0, 2^31), got 2147483648"),
    ({"draft_slot": torch.tensor(1.0)}, f"draft_slot must be {INTEGER} float32"),
    (
        {"draft_slot": torch.zeros(3, dtype=I64)},
        "draft_slot must be one integer or [batch] with 2 elements, got shape [3]",
    ),
    ({"draft_slot": torch.tensor([0, -1])}, "draft_slot must be in [0, 2^31), got -1 for row 1"),
    ({"draft_slot": torch.tensor(2**31)}, "draft_slot must be in [0, 2^31), got 2147483648 for row 0"),
    (
        {"draft_slot": torch.tensor(0), "seeds": None, "positions": None, "uniforms": torch.zeros(2)},
        "draft_slot and uniforms must be at most one, got both",
    ),
    *entries_cases(-1, "row"),
    ({"token_dtype": torch.int16}, "token_dtype must be int32 or int64, got int16"),
    *common_cases("[batch]", 2, "logits"),
    *uniform_cases("[batch]", 2),
]
SAMPLE_RECOVERED_CASES = [
    ({"draft_token_ids": torch.zeros(3)}, f"draft_token_ids must be {INTEGER} float32"),
    (
        {"draft_token_ids": torch.zeros(3, 1, dtype=I64)},
        "draft_token_ids must be [num_drafts], got shape [3, 1]",
    ),
    ({"target_logits": torch.zeros(3, 5, dtype=F64)}, f"target_logits must be {ROWS} float64"),
    (
        {"target_logits": torch.zeros(4, 5)},
        "target_logits must be [num_drafts, width] with 3 rows, got shape [4, 5]",
    ),
    (
        {"target_logits": torch.zeros(5, 3).t()},
        "target_logits must have a contiguous last dimension, got stride 3",
    ),
    ({"target_logits": torch.zeros(3, 0)}, "target_logits must have at least one column, got shape [3, 0]"),
    *common_cases("[num_drafts]", 3, "target_logits"),
    *draft_law_cases("[num_drafts]", 3),
    ({"draft_logits": torch.zeros(3, 1, 5)}, "draft_logits must be [num_drafts, width], got shape [3, 1, 5]"),
    *uniform_cases("[num_drafts]", 3),
]
COUNT_ACCEPTED_CASES = [
    ({"token_ids": torch.zeros(2, 3)}, f"token_ids must be {INTEGER} float32"),
    ({"token_ids": torch.zeros(3, dtype=I64)}, "token_ids must be [batch, k + 1], got shape [3]"),
    ({"vocab_size": 0}, "vocab_size must be at least 1, got 0"),
]
CASES: list[tuple[str, Callable[[], Arguments], Arguments, str]] = [
    *(("verify_chain", chain_arguments, *case) for case in VERIFY_CHAIN_CASES),
    *(("sample", sample_arguments, *case) for case in SAMPLE_CASES),
    *(("sample_recovered", recovered_arguments, *case) for case in SAMPLE_RECOVERED_CASES),
    *(
        ("count_accepted", lambda: {"token_ids": torch.zeros(2, 3, dtype=I64)}, *case)
        for case in COUNT_ACCEPTED_CASES
    ),
]


@pytest.mark.parametrize(
    ("op", "arguments", "change", "message"),
    CASES,
    ids=[f"{op}-{'-'.join(change)}-{i}" for i, (op, _, change, _) in enumerate(CASES)],
)
def test_bad_arguments_are_named(
    default_native: Implementation,
    op: str,
    arguments: Callable[[], Arguments],
    change: Arguments,
    message: str,
) -> None:
    function = getattr(default_native, op)
    function(**arguments())
    with pytest.raises(RuntimeError, match=rf"(^|\s){op}: {re.escape(message)}"):
        function(**{**arguments(), **change})


@pytest.mark.parametrize(
    ("op", "arguments", "name"),
    [
        ("verify_chain", chain_arguments, "target_logits"),
        ("sample", sample_arguments, "logits"),
        ("sample_recovered", recovered_arguments, "target_logits"),
    ],
)
def test_scalars_are_refused_with_a_message(
    default_native: Implementation, op: str, arguments: Callable[[], Arguments], name: str
) -> None:
    with pytest.raises(RuntimeError, match=rf"{op}: {name} must be "):
        getattr(default_native, op)(**{**arguments(), name: torch.tensor(0.0)})


def test_greedy_requests_need_no_random_numbers(implementation: Implementation) -> None:
    arguments = inputs.chain([2, 1], 30, "one_hot", seed=1, temperature=torch.zeros(2))
    del arguments["seeds"], arguments["positions"]
    assert (implementation.verify_chain(**arguments).token_ids[:, 0] >= 0).all()
    implementation.sample(arguments["target_logits"], temperature=0.0)


def test_a_message_has_no_build_path(default_native: Implementation) -> None:
    with pytest.raises(RuntimeError) as caught:
        default_native.sample(torch.zeros(2, 5), temperature=1.0)
    assert "/work" not in str(caught.value) and ".cpp:" not in str(caught.value).splitlines()[0]
