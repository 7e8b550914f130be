"""warmup: has a device compile what serving will need, before the first request."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec_ops.ops.advance_draft_step import advance_draft_step_
from specdec_ops.ops.apply_logit_processors import apply_logit_processors_
from specdec_ops.ops.combine_sampled_and_draft_tokens import combine_sampled_and_draft_tokens_
from specdec_ops.ops.compute_slot_mapping import compute_slot_mapping
from specdec_ops.ops.count_accepted import count_accepted
from specdec_ops.ops.count_emitted_and_rejected import count_emitted_and_rejected
from specdec_ops.ops.expand_dflash_inputs import expand_dflash_inputs
from specdec_ops.ops.expand_draft_inputs import expand_draft_inputs
from specdec_ops.ops.expand_draft_logits import expand_draft_logits
from specdec_ops.ops.expand_request_indices import expand_request_indices
from specdec_ops.ops.expand_to_drafts import expand_to_drafts
from specdec_ops.ops.gather_draft_tokens import gather_draft_tokens
from specdec_ops.ops.map_draft_tokens import map_draft_tokens
from specdec_ops.ops.plan_verification import plan_verification
from specdec_ops.ops.prepare_next_tokens import prepare_next_tokens
from specdec_ops.ops.prepare_padded_draft_inputs import prepare_padded_draft_inputs
from specdec_ops.ops.prepare_positions_and_seq_lens import prepare_positions_and_seq_lens_
from specdec_ops.ops.row_statistics import row_statistics
from specdec_ops.ops.sample import sample
from specdec_ops.ops.sample_recovered import sample_recovered
from specdec_ops.ops.sample_recovered_probs import sample_recovered_probs
from specdec_ops.ops.token_logprobs import token_logprobs
from specdec_ops.ops.update_num_computed_tokens import update_num_computed_tokens_
from specdec_ops.ops.update_request_state import update_request_state_
from specdec_ops.ops.verify_argmax import verify_argmax
from specdec_ops.ops.verify_chain import verify_chain
from specdec_ops.ops.verify_probs import verify_probs
from specdec_ops.rules import Typical

#: Batches that a compiler of kernels may tell apart: one, a multiple of 16, and neither.
_BATCHES = (1, 2, 16)
#: Keyword arguments of a call.
Arguments = dict[str, Any]
#: Of the made-up key-value cache.
_BLOCK_SIZE, _MAX_MODEL_LEN = 16, 64
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class OpWarmup(NamedTuple):
    """How one op was warmed up."""

    #: The op's name.
    op: str
    #: Calls made, each with another combination of shapes, dtypes and optional arguments.
    num_calls: int
    #: How long they took, the device's work included.
    seconds: float


class WarmupReport(NamedTuple):
    """What ``warmup`` did.

    Example:
        >>> import specdec_ops
        >>> report = specdec_ops.warmup(
        ...     device="cpu", vocab_size=1000, max_num_reqs=4, num_speculative_tokens=3
        ... )
        >>> print(report)
        warm-up of cpu: not needed, its kernels are compiled ahead
    """

    #: The device that was warmed up.
    device: torch.device
    #: One entry for each op; none where a device needs no warm-up.
    ops: tuple[OpWarmup, ...]

    def __str__(self) -> str:
        """One line, and one for each op."""
        if not self.ops:
            return f"warm-up of {self.device}: not needed, its kernels are compiled ahead"
        total = OpWarmup("all", sum(op.num_calls for op in self.ops), sum(op.seconds for op in self.ops))
        lines = [f"  {op:<34} {calls:>5} calls {seconds:8.3f} s" for op, calls, seconds in (*self.ops, total)]
        return "\n".join([f"warm-up of {self.device}:", *lines])


def warmup(
    *tensors: Tensor,
    device: torch.device | str | None = None,
    vocab_size: int,
    max_num_reqs: int,
    num_speculative_tokens: int,
    dtypes: Sequence[torch.dtype] = _DTYPES,
    rules: Sequence[str] = ("token",),
) -> WarmupReport:
    """Calls every op on a device, so that what is compiled there is compiled before the first request.

    The CPU needs nothing: its kernels are compiled ahead. On any other device each op runs on made-up inputs
    with every draft law, source of random numbers and width of integers (int64 beside float64, int32 beside
    float32), in batches of 1, 2 and 16 requests as far as ``max_num_reqs`` allows; and at one of these sizes
    with each further optional argument alone and with all of them. Nothing is compiled anew for other numbers
    of requests and drafts. The calls are queued on the current stream and waited for; torch's random numbers
    are left alone.

    Args:
        *tensors: Tensors on the device to warm up, the model's weights for instance. They are not read.
        device: The device to warm up. Needed without tensors; with them it must be theirs.
        vocab_size: Width of the logits.
        max_num_reqs: The most requests in a batch.
        num_speculative_tokens: The most drafts of a request.
        dtypes: Of the logits: float32, bfloat16, float16 or some of them. Default: all.
        rules: Rules of verification that will be used: ``"token"`` (the default), ``"synthetic"``
            (``accept_rates``), ``"fly"`` (``fly_window_size``), ``"block"``, ``"exact_match"``,
            ``"lossy"`` (one of :mod:`specdec_ops.rules`); ``"filters"`` (top-k, top-p, min-p, at token
            level).

    Returns:
        A :class:`WarmupReport`: for each op the number of calls and the time that they took.

    Raises:
        RuntimeError: Tensors and ``device`` name no device, or different ones, or one that is not there; or
            another argument is out of range. The message names it.

    Source: none; it makes no results.

    Example:
        >>> import torch, specdec_ops
        >>> logits = torch.zeros(1, 32000)
        >>> report = specdec_ops.warmup(
        ...     logits, vocab_size=32000, max_num_reqs=64, num_speculative_tokens=4
        ... )
        >>> report.device.type, report.ops
        ('cpu', ())
    """
    where = _device(tensors, device)
    _check_sizes(
        vocab_size=vocab_size, max_num_reqs=max_num_reqs, num_speculative_tokens=num_speculative_tokens
    )
    _check_names("dtypes", dtypes, _DTYPES)
    _check_names("rules", rules, tuple(_RULES))
    if where.type == "cpu":
        return WarmupReport(where, ())

    accelerator = torch.accelerator.current_accelerator() or torch.device("cpu")
    sizes = (max_num_reqs, num_speculative_tokens, vocab_size)
    reports = []
    with torch.no_grad():
        for op in (*_OPS_ON_ROWS, *_OPS_ON_IDS):
            num_calls, start = 0, time.perf_counter()
            for arguments in _calls(op, where, sizes, dtypes, rules):
                op(**arguments)
                num_calls += 1
            if where.type == accelerator.type:
                torch.accelerator.synchronize(where)
            reports.append(OpWarmup(op.__name__, num_calls, time.perf_counter() - start))
    return WarmupReport(where, tuple(reports))


class _Inputs:
    """Made-up inputs of one batch, in one dtype of logits and one width of ids and of other numbers."""

    def __init__(
        self,
        device: torch.device,
        sizes: tuple[int, int, int],
        dtype: torch.dtype,
        token_dtype: torch.dtype,
        *,
        with_options: bool,
    ) -> None:
        self.device = device
        self.batch, self.num_slots, self.vocab_size = sizes
        self.num_drafts = self.batch * self.num_slots
        self.num_tokens = self.num_drafts + self.batch
        self.dtype = dtype
        self.token_dtype = token_dtype
        #: Whether to go through the optional arguments that neither choose a draft law nor draw.
        self.with_options = with_options

    def logits(self, num_rows: int) -> Tensor:
        row = torch.arange(self.vocab_size, device=self.device).remainder(7).to(self.dtype)
        return row.repeat(num_rows, 1)

    def ids(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=self.token_dtype, device=self.device)

    def reals(self, size: int) -> Tensor:
        """Uniform numbers, or rates."""
        dtype = torch.float64 if self.token_dtype == torch.int64 else torch.float32
        return torch.full((size,), 0.5, dtype=dtype, device=self.device)

    def float32(self, *shape: int) -> Tensor:
        return torch.ones(shape, dtype=torch.float32, device=self.device)

    def flags(self, size: int) -> Tensor:
        return torch.ones(size, dtype=torch.bool, device=self.device)

    def request_indices(self) -> Tensor:
        return torch.arange(self.batch, device=self.device).to(self.token_dtype)

    def totals(self, each: int) -> Tensor:
        """Running totals where every request has the same number."""
        return torch.arange(self.batch + 1, device=self.device).mul(each).to(self.token_dtype)

    def block_table(self) -> Tensor:
        return self.ids(self.batch, _MAX_MODEL_LEN // _BLOCK_SIZE)

    def chain(self) -> Arguments:
        return {
            "draft_token_ids": self.ids(self.num_drafts),
            "cu_num_draft_tokens": self.totals(self.num_slots),
            "max_num_draft_tokens": self.num_slots,
        }

    def filters(self, size: int) -> Arguments:
        return {
            "top_k": self.ids(size).add(3),
            "top_p": self.float32(size).mul(0.9),
            "min_p": self.float32(size).mul(0.1),
            "filter_order": "joint",
        }

    def draft_filters(self, size: int, law: Arguments) -> Arguments:
        """What masks the logits of a draft law that has some."""
        if "draft_logsumexp" in law:
            return {"draft_thresholds": self.float32(self.num_drafts)}
        filters = self.filters(size) if "draft_logits" in law else {}
        return {f"draft_{name}": value for name, value in filters.items() if name != "filter_order"}

    def seeds(self, size: int) -> Arguments:
        seeds = torch.arange(size, device=self.device)
        return {"seeds": seeds, "positions": self.ids(size)}


def _none_each_all(options: Arguments, inputs: _Inputs) -> Iterator[Arguments]:
    """No option, each alone, all of them; without ``with_options`` no option."""
    yield {}
    if inputs.with_options:
        yield from ({name: value} for name, value in options.items())
        if len(options) > 1:
            yield options


def _draft_laws(inputs: _Inputs, num_requests: int) -> Iterator[tuple[Arguments, Arguments]]:
    """Each draft law, with the options that it allows."""
    rows = inputs.num_drafts
    yield {}, {}
    law_of_some = {"has_draft_law": inputs.flags(num_requests)}
    own_temperature = {**law_of_some, "draft_temperature": inputs.float32(num_requests)}
    draft_logits = inputs.logits(rows)
    yield {"draft_logits": draft_logits}, own_temperature
    yield {"draft_logits": draft_logits, "draft_logsumexp": inputs.reals(rows)}, own_temperature
    yield {"draft_probs": draft_logits.softmax(dim=1)}, law_of_some
    support = {
        "draft_support_ids": inputs.ids(rows, 2),
        "draft_support_logprobs": inputs.float32(rows, 2).neg(),
    }
    yield support, law_of_some


#: What ``verify_chain`` is given for each rule of verification.
_RULES: dict[str, Callable[[_Inputs], Arguments]] = {
    "token": lambda inputs: {},
    "synthetic": lambda inputs: {"accept_rates": inputs.reals(inputs.num_slots)},
    "fly": lambda inputs: {"fly_window_size": 1},
    "block": lambda inputs: {"rule": "block"},
    "exact_match": lambda inputs: {"rule": "exact_match"},
    "lossy": lambda inputs: {"rule": Typical()},
    "filters": lambda inputs: inputs.filters(inputs.batch),
}


def _verify_chain_calls(inputs: _Inputs, rules: Sequence[str]) -> Iterator[Arguments]:
    batch, num_drafts = inputs.batch, inputs.num_drafts
    # The first request samples, the second is greedy, and so on.
    sampling = {"temperature": torch.arange(1, batch + 1, device=inputs.device).remainder(2).float()}
    uniforms = {"accept_uniforms": inputs.reals(num_drafts), "recovered_uniforms": inputs.reals(batch)}
    draws: dict[str, Arguments] = {
        "none": {"temperature": 0.0},
        "seeds": sampling | inputs.seeds(batch),
        "uniforms": sampling | uniforms,
    }
    logits = inputs.logits(num_drafts + batch)
    for rule, (source, drawn), (law, law_options) in itertools.product(
        rules, draws.items(), _draft_laws(inputs, batch)
    ):
        if rule == "synthetic" and source == "none":
            continue  # Its coins need a source for greedy requests too.
        options = law_options | {
            "request_indices": inputs.request_indices(),
            "bonus_token_ids": inputs.ids(batch),
            "vocab_size": inputs.vocab_size,
            "return_logsumexp": True,
            "return_logprobs": True,
            "return_accept_probs": True,
        }
        if rule == "exact_match" and source == "seeds":
            options["sampler"] = "gumbel"
        if rule == "lossy":
            options["rule_mask"] = inputs.flags(num_drafts)
        if rule == "filters":
            options |= inputs.draft_filters(batch, law)
        for chosen in _none_each_all(options, inputs):
            rows = logits[:num_drafts] if "bonus_token_ids" in chosen else logits
            yield {"target_logits": rows, **inputs.chain(), **drawn, **law, **_RULES[rule](inputs), **chosen}


def _sample_calls(inputs: _Inputs, rules: Sequence[str]) -> Iterator[Arguments]:
    seeds = inputs.seeds(inputs.batch)
    for drawn in (
        {"temperature": 0.0},
        seeds,
        seeds | {"draft_slot": 0},
        seeds | {"draft_slot": inputs.ids(inputs.batch)},
        {"uniforms": inputs.reals(inputs.batch)},
        *([seeds | {"sampler": "gumbel"}] if "exact_match" in rules else []),
        *([seeds | inputs.filters(inputs.batch)] if "filters" in rules else []),
        seeds | {"law_size": 8},
    ):
        options = {"request_indices": inputs.request_indices(), "vocab_size": inputs.vocab_size}
        for chosen in _none_each_all(options, inputs):
            yield {
                "logits": inputs.logits(inputs.batch),
                "token_dtype": inputs.token_dtype,
                **drawn,
                **chosen,
            }


def _sample_recovered_calls(inputs: _Inputs, rules: Sequence[str]) -> Iterator[Arguments]:
    num_drafts = inputs.num_drafts
    draws: tuple[Arguments, ...] = (
        {"temperature": 0.0},
        inputs.seeds(num_drafts),
        {"uniforms": inputs.reals(num_drafts)},
    )
    rows = {"target_logits": inputs.logits(num_drafts), "draft_token_ids": inputs.ids(num_drafts)}
    for drawn, (law, law_options) in itertools.product(draws, _draft_laws(inputs, num_drafts)):
        options = law_options | {"vocab_size": inputs.vocab_size}
        for chosen in _none_each_all(options, inputs):
            yield {**rows, **drawn, **law, **chosen}
        if "filters" not in rules:
            continue
        filters = inputs.filters(num_drafts)
        for chosen in _none_each_all(options | inputs.draft_filters(num_drafts, law), inputs):
            yield {**rows, **drawn, **law, **filters, **chosen}


def _count_accepted_calls(inputs: _Inputs, rules: Sequence[str]) -> Iterator[Arguments]:
    for chosen in _none_each_all({"vocab_size": inputs.vocab_size}, inputs):
        yield {"token_ids": inputs.ids(inputs.batch, inputs.num_slots + 1), **chosen}


def _verify_argmax_calls(inputs: _Inputs, rules: Sequence[str]) -> Iterator[Arguments]:
    batch, num_drafts = inputs.batch, inputs.num_drafts
    for rule in _rules_without_laws(inputs, rules):
        drawn = {"accept_uniforms": inputs.reals(num_drafts)} if rule else {}
        for chosen in _none_each_all({"is_greedy": inputs.flags(batch)}, inputs):
            yield {
                "target_argmax": inputs.ids(num_drafts),
                **inputs.chain(),
                "bonus_token_ids": inputs.ids(batch),
                **rule,
                **drawn,
                **chosen,
            }


def _verify_probs_calls(inputs: _Inputs, rules: Sequence[str]) -> Iterator[Arguments]:
    batch, num_drafts = inputs.batch, inputs.num_drafts
    probs = inputs.logits(num_drafts).softmax(dim=1)
    options = {"is_greedy": inputs.flags(batch), "vocab_size": inputs.vocab_size}
    laws: tuple[Arguments, ...] = ({}, {"draft_probs": probs})
    for rule, law in itertools.product(_rules_without_laws(inputs, rules), laws):
        for chosen in _none_each_all(options, inputs):
            yield {
                "target_probs": probs,
                **inputs.chain(),
                "recovered_token_ids": inputs.ids(num_drafts),
                "bonus_token_ids": inputs.ids(batch),
                "accept_uniforms": inputs.reals(num_drafts),
                **rule,
                **law,
                **chosen,
            }


def _rules_without_laws(inputs: _Inputs, rules: Sequence[str]) -> list[Arguments]:
    """What the ops that are given the target's argmax or probabilities get, for the rules that they have."""
    return [_RULES[rule](inputs) for rule in rules if rule in ("token", "synthetic")]


def _sample_recovered_probs_calls(inputs: _Inputs, rules: Sequence[str]) -> Iterator[Arguments]:
    probs = inputs.logits(inputs.num_drafts).softmax(dim=1)
    noise = inputs.reals(inputs.batch * inputs.vocab_size).reshape(inputs.batch, inputs.vocab_size)
    laws: tuple[Arguments, ...] = ({}, {"draft_probs": probs})
    for law in laws:
        for chosen in _none_each_all({"vocab_size": inputs.vocab_size}, inputs):
            yield {
                "target_probs": probs,
                "draft_token_ids": inputs.ids(inputs.num_drafts),
                "cu_num_draft_tokens": inputs.totals(inputs.num_slots),
                "inverse_noise": noise,
                **law,
                **chosen,
            }


def _expand_to_drafts_calls(inputs: _Inputs, rules: Sequence[str]) -> Iterator[Arguments]:
    # Temperatures, top-p and the like beside ids, top-k and the like.
    for values in (inputs.float32(inputs.batch), inputs.ids(inputs.batch)):
        replaced: Arguments = {"replace_from": 0.0, "replace_to": 1.0}
        for chosen in ({}, replaced) if inputs.with_options else ({},):
            yield {
                "values": values,
                "cu_num_draft_tokens": inputs.totals(inputs.num_slots),
                "num_drafts": inputs.num_drafts,
                **chosen,
            }


def _prepare_next_tokens_calls(inputs: _Inputs, rules: Sequence[str]) -> Iterator[Arguments]:
    yield {
        "token_ids": inputs.ids(inputs.batch, inputs.num_slots + 1),
        "discard_request_mask": inputs.flags(inputs.batch),
        "backup_token_ids": inputs.ids(inputs.batch),
        "vocab_size": inputs.vocab_size,
    }


def _prepare_padded_draft_inputs_calls(inputs: _Inputs, rules: Sequence[str]) -> Iterator[Arguments]:
    yield {
        "cu_num_draft_tokens": inputs.totals(inputs.num_slots),
        "num_sampled": inputs.ids(inputs.batch),
        "query_start_loc": inputs.totals(inputs.num_slots + 1),
    }


def _expand_draft_inputs_calls(inputs: _Inputs, rules: Sequence[str]) -> Iterator[Arguments]:
    for shift_input_ids in (False, True):
        yield {
            "target_token_ids": inputs.ids(inputs.num_tokens),
            "target_positions": inputs.ids(inputs.num_tokens),
            "next_token_ids": inputs.ids(inputs.batch),
            "query_start_loc": inputs.totals(inputs.num_slots + 1),
            "query_end_loc": inputs.totals(inputs.num_slots + 1)[1:] - 1,
            "padding_token_id": 0,
            "parallel_drafting_token_id": 0,
            "num_padding_slots_per_request": inputs.num_slots,
            "shift_input_ids": shift_input_ids,
        }


def _expand_dflash_inputs_calls(inputs: _Inputs, rules: Sequence[str]) -> Iterator[Arguments]:
    options = {"num_rejected_tokens": inputs.ids(inputs.batch), "max_model_len": _MAX_MODEL_LEN}
    for chosen in _none_each_all(options, inputs):
        yield {
            "next_token_ids": inputs.ids(inputs.batch),
            "target_positions": inputs.ids(inputs.num_tokens),
            "block_table": inputs.block_table(),
            "query_start_loc": inputs.totals(inputs.num_slots + 1),
            "parallel_drafting_token_id": 0,
            "block_size": _BLOCK_SIZE,
            "num_queries_per_request": inputs.num_slots + 1,
            "num_speculative_tokens": inputs.num_slots,
            **chosen,
        }


def _compute_slot_mapping_calls(inputs: _Inputs, rules: Sequence[str]) -> Iterator[Arguments]:
    yield {
        "query_start_loc": inputs.totals(inputs.num_slots + 1),
        "positions": inputs.ids(inputs.num_tokens),
        "block_table": inputs.block_table(),
        "block_size": _BLOCK_SIZE,
    }


def _advance_draft_step_calls(inputs: _Inputs, rules: Sequence[str]) -> Iterator[Arguments]:
    yield {
        "positions": inputs.ids(inputs.batch),
        "block_table": inputs.block_table(),
        "seq_lens": inputs.ids(inputs.batch) + 1,
        "out_positions": inputs.ids(inputs.batch),
        "out_slot_mapping": inputs.ids(inputs.batch),
        "block_size": _BLOCK_SIZE,
        "max_model_len": _MAX_MODEL_LEN,
    }


def _prepare_positions_and_seq_lens_calls(inputs: _Inputs, rules: Sequence[str]) -> Iterator[Arguments]:
    yield {
        "request_indices": inputs.request_indices(),
        "query_start_loc": inputs.totals(inputs.num_slots + 1),
        "num_computed_tokens": inputs.ids(inputs.batch),
        "positions": inputs.ids(inputs.num_tokens),
        "seq_lens": inputs.ids(inputs.batch),
    }


def _combine_sampled_and_draft_tokens_calls(inputs: _Inputs, rules: Sequence[str]) -> Iterator[Arguments]:
    totals = inputs.totals(inputs.num_slots + 1)
    yield {
        "request_indices": inputs.request_indices(),
        "query_start_loc": totals,
        "seq_lens": inputs.ids(inputs.batch) + inputs.num_slots + 2,
        "cu_num_logits": totals,
        "last_token_ids": inputs.ids(inputs.batch),
        "draft_token_ids": inputs.ids(inputs.batch, inputs.num_slots),
        "prefill_lens": inputs.ids(inputs.batch) + 1,
        "input_ids": inputs.ids(inputs.num_tokens),
        "logits_indices": inputs.ids(inputs.num_tokens),
    }


def _expand_request_indices_calls(inputs: _Inputs, rules: Sequence[str]) -> Iterator[Arguments]:
    yield {
        "request_indices": inputs.request_indices(),
        "cu_num_logits": inputs.totals(inputs.num_slots + 1),
        "num_logits": inputs.num_tokens,
    }


def _gather_draft_tokens_calls(inputs: _Inputs, rules: Sequence[str]) -> Iterator[Arguments]:
    yield {
        "input_ids": inputs.ids(inputs.num_tokens),
        "positions": inputs.ids(inputs.num_tokens),
        "logits_indices": inputs.ids(inputs.num_tokens),
        "expanded_request_indices": inputs.ids(inputs.num_tokens),
        "local_positions": inputs.ids(inputs.num_tokens),
        "prefill_lens": inputs.ids(inputs.batch),
    }


def _count_emitted_and_rejected_calls(inputs: _Inputs, rules: Sequence[str]) -> Iterator[Arguments]:
    yield {
        "num_emitted": inputs.ids(inputs.batch),
        "request_indices": inputs.request_indices(),
        "seq_lens": inputs.ids(inputs.batch),
        "cu_num_logits": inputs.totals(inputs.num_slots + 1),
        "prefill_lens": inputs.ids(inputs.batch),
    }


def _update_request_state_calls(inputs: _Inputs, rules: Sequence[str]) -> Iterator[Arguments]:
    batch = inputs.batch
    drafts = {
        "new_draft_token_ids": inputs.ids(batch, inputs.num_slots),
        "draft_token_ids": inputs.ids(batch, inputs.num_slots),
    }
    options = {
        "query_start_loc": inputs.totals(inputs.num_slots + 1),
        "output_counts": inputs.ids(batch, inputs.vocab_size),
    }
    for stored in ({}, drafts) if inputs.with_options else ({},):
        for chosen in _none_each_all(options, inputs):
            yield {
                "request_indices": inputs.request_indices(),
                "sampled_token_ids": inputs.ids(batch, inputs.num_slots + 1),
                "num_emitted": inputs.ids(batch) + 1,
                "num_rejected": inputs.ids(batch),
                "num_computed_tokens": inputs.ids(batch),
                "last_token_ids": inputs.ids(batch),
                "total_lens": inputs.ids(batch),
                "all_token_ids": inputs.ids(batch, _MAX_MODEL_LEN),
                **stored,
                **chosen,
            }


def _update_num_computed_tokens_calls(inputs: _Inputs, rules: Sequence[str]) -> Iterator[Arguments]:
    yield {
        "request_indices": inputs.request_indices(),
        "query_start_loc": inputs.totals(inputs.num_slots + 1),
        "num_computed_tokens": inputs.ids(inputs.batch),
    }


def _plan_verification_calls(inputs: _Inputs, rules: Sequence[str]) -> Iterator[Arguments]:
    accept_probs = inputs.reals(inputs.num_drafts)
    costs = {"step_costs": inputs.reals(inputs.num_tokens + 1)}
    limits: tuple[Arguments, ...] = ({"budget": inputs.num_slots}, costs, {"budget": inputs.ids(), **costs})
    for limit in limits if inputs.with_options else limits[:1]:
        yield {
            "accept_probs": accept_probs,
            "cu_num_draft_tokens": inputs.totals(inputs.num_slots),
            **limit,
        }


def _row_statistics_calls(inputs: _Inputs, rules: Sequence[str]) -> Iterator[Arguments]:
    logits = inputs.logits(inputs.num_tokens)
    ways: list[tuple[int, Arguments]] = [(inputs.batch, {"row_indices": inputs.request_indices()})]
    if inputs.token_dtype == torch.int64:  # Without indices there are no integers to tell apart.
        ways.append((inputs.num_tokens, {"vocab_size": inputs.vocab_size}))
    for num_rows, chosen in ways:
        pair = {"draft_logits": inputs.logits(num_rows)}
        own_temperature = {"draft_temperature": inputs.float32(num_rows)}
        for law in ({}, pair, pair | own_temperature) if inputs.with_options else ({}, pair):
            yield {"logits": logits, "temperature": inputs.float32(num_rows), **law, **chosen}


def _token_logprobs_calls(inputs: _Inputs, rules: Sequence[str]) -> Iterator[Arguments]:
    batch, rows = inputs.batch, inputs.num_tokens
    given = {"token_ids": inputs.ids(rows), "temperature": inputs.float32(rows)}
    verified = {
        "token_ids": inputs.ids(batch, inputs.num_slots + 1),
        "temperature": inputs.float32(batch),
        "cu_num_draft_tokens": inputs.totals(inputs.num_slots),
    }
    for tokens in (given, verified):
        for chosen in _none_each_all({"top_n": 2, "vocab_size": inputs.vocab_size}, inputs):
            yield {"logits": inputs.logits(rows), **tokens, **chosen}


def _draft_vocabulary(inputs: _Inputs) -> Iterator[Arguments]:
    """A drafter that knows every id."""
    yield {"d2t": torch.arange(inputs.vocab_size, device=inputs.device).to(inputs.token_dtype)}
    if inputs.with_options:
        yield {"d2t": inputs.ids(inputs.vocab_size), "offsets": True}


def _map_draft_tokens_calls(inputs: _Inputs, rules: Sequence[str]) -> Iterator[Arguments]:
    for vocabulary in _draft_vocabulary(inputs):
        yield {"draft_token_ids": inputs.ids(inputs.num_drafts), **vocabulary}


def _expand_draft_logits_calls(inputs: _Inputs, rules: Sequence[str]) -> Iterator[Arguments]:
    rows = {"draft_logits": inputs.logits(inputs.num_drafts), "vocab_size": inputs.vocab_size}
    options = {"temperature": inputs.float32(inputs.num_drafts), "dtype": torch.float32}
    for vocabulary in _draft_vocabulary(inputs):
        for chosen in _none_each_all(options, inputs):
            yield {**rows, **vocabulary, **chosen}


def _apply_logit_processors_calls(inputs: _Inputs, rules: Sequence[str]) -> Iterator[Arguments]:
    batch, rows = inputs.batch, inputs.num_tokens
    ids, lens = inputs.ids(batch, 2), inputs.ids(batch) + 1
    one = inputs.float32(batch)
    words = torch.full((rows, (inputs.vocab_size + 31) // 32), -1, dtype=torch.int32, device=inputs.device)
    groups: tuple[Arguments, ...] = (
        {"logit_bias_ids": ids, "logit_bias": inputs.float32(batch, 2)},
        {"repetition_penalty": one, "frequency_penalty": one, "presence_penalty": one},
        {"allowed_token_ids": ids},
        {"grammar_bitmask": words},
        {"min_tokens": lens, "stop_token_ids": ids},
        {"bad_words": inputs.ids(batch, 1, 2)},
    )
    history = {
        "prompt_token_ids": ids,
        "prompt_lens": lens,
        "output_token_ids": ids,
        "output_lens": lens,
        "vocab_size": inputs.vocab_size,
    }
    drafts = {
        "draft_token_ids": inputs.ids(inputs.num_drafts),
        "cu_num_draft_tokens": inputs.totals(inputs.num_slots),
    }
    everything = {name: value for group in groups for name, value in group.items()}
    yield {"logits": inputs.logits(rows), **drafts, **history, **everything}
    if inputs.with_options:
        for group in groups:
            yield {"logits": inputs.logits(rows), **drafts, **history, **group}
        yield {"logits": inputs.logits(batch), "allowed_token_ids": ids}


_Calls = Callable[[_Inputs, Sequence[str]], Iterator[Arguments]]
#: The keyword arguments of each call that warms an op up. The form of an op that returns its outputs stands
#: for the one that writes into the caller's buffers: both are one kernel.
_OPS_ON_ROWS: dict[Callable[..., Any], _Calls] = {
    verify_chain: _verify_chain_calls,
    verify_probs: _verify_probs_calls,
    sample: _sample_calls,
    sample_recovered: _sample_recovered_calls,
    sample_recovered_probs: _sample_recovered_probs_calls,
    row_statistics: _row_statistics_calls,
    token_logprobs: _token_logprobs_calls,
    apply_logit_processors_: _apply_logit_processors_calls,
    expand_draft_logits: _expand_draft_logits_calls,
}
#: Those whose kernels do not depend on the dtype of the logits.
_OPS_ON_IDS: dict[Callable[..., Any], _Calls] = {
    verify_argmax: _verify_argmax_calls,
    count_accepted: _count_accepted_calls,
    plan_verification: _plan_verification_calls,
    map_draft_tokens: _map_draft_tokens_calls,
    expand_to_drafts: _expand_to_drafts_calls,
    prepare_next_tokens: _prepare_next_tokens_calls,
    prepare_padded_draft_inputs: _prepare_padded_draft_inputs_calls,
    expand_draft_inputs: _expand_draft_inputs_calls,
    expand_dflash_inputs: _expand_dflash_inputs_calls,
    compute_slot_mapping: _compute_slot_mapping_calls,
    advance_draft_step_: _advance_draft_step_calls,
    prepare_positions_and_seq_lens_: _prepare_positions_and_seq_lens_calls,
    combine_sampled_and_draft_tokens_: _combine_sampled_and_draft_tokens_calls,
    expand_request_indices: _expand_request_indices_calls,
    gather_draft_tokens: _gather_draft_tokens_calls,
    count_emitted_and_rejected: _count_emitted_and_rejected_calls,
    update_request_state_: _update_request_state_calls,
    update_num_computed_tokens_: _update_num_computed_tokens_calls,
}


def _calls(
    op: Callable[..., Any],
    device: torch.device,
    sizes: tuple[int, int, int],
    dtypes: Sequence[torch.dtype],
    rules: Sequence[str],
) -> Iterator[Arguments]:
    """Every call that warms ``op`` up; sizes are max_num_reqs, num_speculative_tokens and vocab_size."""
    max_num_reqs, num_slots, vocab_size = sizes
    batches = [batch for batch in _BATCHES if batch <= max_num_reqs]
    if op in _OPS_ON_IDS:
        dtypes = dtypes[:1]
    for batch, dtype, token_dtype in itertools.product(batches, dtypes, (torch.int64, torch.int32)):
        # Options differ in what is read and written, whatever the batch: one size does for them.
        with_options = batch == min(2, max_num_reqs)
        inputs = _Inputs(
            device, (batch, num_slots, vocab_size), dtype, token_dtype, with_options=with_options
        )
        yield from (_OPS_ON_ROWS | _OPS_ON_IDS)[op](inputs, rules)


def _device(tensors: Sequence[Tensor], device: torch.device | str | None) -> torch.device:
    """The one device that the tensors and the argument name, with its index."""
    for i, tensor in enumerate(tensors):
        if not isinstance(tensor, Tensor):
            raise RuntimeError(f"warmup: tensors[{i}] must be a tensor, got {type(tensor).__name__}")
    if device is None and not tensors:
        raise RuntimeError("warmup: device must be given, or tensors that are on it, got neither")
    try:
        named = torch.device(tensors[0].device if device is None else device)
        if named.index is None and tensors and tensors[0].device.type == named.type:
            named = tensors[0].device
        named = torch.empty(0, device=named).device
    except (RuntimeError, AssertionError, ImportError) as error:
        raise RuntimeError(f"warmup: device must be one that torch has here, got {device!r}") from error
    for i, tensor in enumerate(tensors):
        if tensor.device != named:
            raise RuntimeError(f"warmup: tensors[{i}] must be on {named}, got one on {tensor.device}")
    return named


def _check_sizes(**sizes: int) -> None:
    for name, size in sizes.items():
        if not isinstance(size, int) or size < 1:
            raise RuntimeError(f"warmup: {name} must be a positive integer, got {size!r}")


def _check_names(name: str, given: Sequence[object], known: tuple[object, ...]) -> None:
    for each in given:
        if each not in known:
            expected = ", ".join(map(str, known))
            raise RuntimeError(f"warmup: {name} must be among {expected}, got {each}")
