"""vLLM's rejection sampler on CPU, called as its engine calls it; absent where vLLM is."""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from _cases import Inputs
from _interleave import Call
from torch import Tensor


def present() -> bool:
    """Whether vLLM is installed; looking costs nothing, importing takes a quarter of a minute."""
    return importlib.util.find_spec("vllm") is not None


@functools.cache
def load() -> Any:
    """vLLM's rejection sampler, with its CPU kernels in place of Triton's.

    Raises:
        RuntimeError: This build of vLLM has no CPU kernels for this machine.
    """
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        raise RuntimeError("vLLM picked another platform than the CPU")
    current_platform.import_kernels()
    if not hasattr(torch.ops._C, "greedy_argmax"):
        raise RuntimeError("vLLM's CPU kernels did not load")
    from vllm.v1.sample import rejection_sampler

    current_platform.register_triton_kernel_overrides()
    return rejection_sampler


def version() -> str:
    import vllm

    return str(vllm.__version__)


def rejection_sample(inputs: Inputs) -> Call:
    """``rejection_sample`` alone: scaled float32 logits, draft probabilities and bonus tokens are ready."""
    case = inputs.case
    scale = 1.0 if case.greedy else inputs.temperature.repeat_interleave(case.num_drafts).unsqueeze(1)
    target_logits = inputs.target_logits[inputs.target_rows].float() / scale
    return _rejection_sample_of(inputs, _draft_probs(inputs), lambda: target_logits)


def filtered_rejection_sample(inputs: Inputs, top_k: int, top_p: float) -> Call:
    """``apply_top_k_top_p`` on a copy of the scaled float32 logits, then ``rejection_sample``.

    The copy is on the clock: an engine makes one a step. Draft probabilities (filtered) and bonus tokens are
    ready.
    """
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

    temperature = inputs.temperature.repeat_interleave(inputs.case.num_drafts).unsqueeze(1)
    target_logits = inputs.target_logits[inputs.target_rows].float() / temperature
    rows = target_logits.shape[0]
    k, p = torch.full((rows,), top_k), torch.full((rows,), top_p)
    draft_probs = None
    if inputs.draft_logits is not None:
        draft_logits = inputs.draft_logits.float() / temperature
        draft_probs = apply_top_k_top_p(draft_logits, k, p).softmax(dim=1, dtype=torch.float32)
    return _rejection_sample_of(inputs, draft_probs, lambda: apply_top_k_top_p(target_logits.clone(), k, p))


def _rejection_sample_of(
    inputs: Inputs, draft_probs: Tensor | None, target_logits: Callable[[], Tensor]
) -> Call:
    """``target_logits`` is on the clock."""
    sampler, metadata = load(), _sampling_metadata(inputs)
    case = inputs.case
    bonus = inputs.target_logits[inputs.bonus_rows].argmax(dim=1, keepdim=True)
    counts = [case.num_drafts] * case.batch
    cu_num_drafts = inputs.cu_num_draft_tokens[1:].contiguous()
    return lambda: sampler.rejection_sample(
        inputs.draft_token_ids,
        counts,
        case.num_drafts,
        cu_num_drafts,
        draft_probs,
        target_logits(),
        bonus,
        metadata,
    )


def step(inputs: Inputs) -> Call:
    """All of a step from the same logits: softmax of the drafts' law, then ``RejectionSampler.forward``."""
    sampler, metadata, _, logits, sampling_metadata = _forward_arguments(inputs)
    return lambda: sampler(metadata, _draft_probs(inputs), logits, sampling_metadata).sampled_token_ids


def forward(inputs: Inputs) -> Call:
    """``RejectionSampler.forward`` as it is; the draft probabilities are made beforehand."""
    stock = load().RejectionSampler.forward
    return functools.partial(stock, *_forward_arguments(inputs))


def filtered_forward(inputs: Inputs, top_k: int, top_p: float) -> Call:
    """The same for requests with filters, which it raises for unless a fault is mended: see docs/vllm.md."""
    engine = load()
    stock, arguments = engine.RejectionSampler.forward, _forward_arguments(inputs, top_k, top_p)
    counts = torch.full((inputs.case.batch,), inputs.case.num_drafts)

    def expand(values: Tensor, *args: Any, replace_from: float = 0, replace_to: float = 0) -> Tensor:
        return values.masked_fill(values == replace_from, replace_to).repeat_interleave(counts)

    def call() -> Any:
        with mock.patch.object(engine, "expand_batch_to_tokens", expand):
            return stock(*arguments)

    return call


def plugin_forward(inputs: Inputs, top_k: int | None = None, top_p: float | None = None) -> Call:
    """What the plug-in puts in its place, on the same arguments."""
    from specdec_ops.integrations.vllm import _rejection_sampler

    engine = load()
    ours = _rejection_sampler.make_forward(engine, engine.RejectionSampler.forward)
    return functools.partial(ours, *_forward_arguments(inputs, top_k, top_p))


def _forward_arguments(
    inputs: Inputs, top_k: int | None = None, top_p: float | None = None
) -> tuple[Any, ...]:
    """A sampler, then what the engine gives it."""
    engine = load()
    from vllm.v1.sample.sampler import Sampler

    sampler = engine.RejectionSampler(Sampler())
    metadata = _spec_decode_metadata(inputs)
    sampling_metadata = _sampling_metadata(inputs)
    if top_k is not None:
        sampling_metadata.top_k = torch.full((inputs.case.batch,), top_k, dtype=torch.int32)
    if top_p is not None:
        sampling_metadata.top_p = torch.full((inputs.case.batch,), top_p)
    return sampler, metadata, _draft_probs(inputs), inputs.target_logits, sampling_metadata


def greedy_argmax(inputs: Inputs) -> Call:
    """Its fastest greedy route: ``_C.greedy_argmax`` of every row, then the greedy kernel."""
    load()
    case = inputs.case
    cu_num_drafts = inputs.cu_num_draft_tokens[1:].long()
    draft_token_ids = inputs.draft_token_ids.long()

    def call() -> Tensor:
        argmax = torch.ops._C.greedy_argmax(inputs.target_logits)
        output = torch.full((case.batch, case.num_drafts + 1), -1)
        by_request = argmax.view(case.batch, -1)
        torch.ops._C.rejection_greedy_sample_kernel_impl(
            output,
            cu_num_drafts,
            draft_token_ids,
            by_request[:, :-1].flatten(),
            by_request[:, -1:],
            None,
            case.num_drafts,
        )
        return output

    return call


def sample(inputs: Inputs) -> Call:
    """Its sampler for CPU: argmax, or temperature and ``_C.fused_gumbel_argmax``."""
    load()
    logits = inputs.target_logits
    if inputs.case.greedy:
        return lambda: torch.ops._C.greedy_argmax(logits)
    temperature = inputs.temperature.unsqueeze(1)
    return lambda: torch.ops._C.fused_gumbel_argmax(
        logits.float().div(temperature), torch.randint(0, 2**31, (logits.shape[0],))
    )


def sample_recovered(inputs: Inputs) -> Call:
    """Softmax of both laws, then ``sample_recovered_tokens``."""
    sampler, metadata = load(), _sampling_metadata(inputs)
    case = inputs.case
    temperature = inputs.temperature.repeat_interleave(case.num_drafts).unsqueeze(1)
    counts = [case.num_drafts] * case.batch
    cu_num_drafts = inputs.cu_num_draft_tokens[1:].contiguous()
    logits = inputs.target_logits[inputs.target_rows]

    def call() -> Any:
        target_probs = logits.float().div(temperature).softmax(dim=1)
        return sampler.sample_recovered_tokens(
            case.num_drafts,
            counts,
            cu_num_drafts,
            inputs.draft_token_ids,
            _draft_probs(inputs),
            target_probs,
            metadata,
            logits.device,
        )

    return call


def count_accepted(token_ids: Tensor) -> Call:
    """The kernel that counts a step's tokens for the next one."""
    load()
    batch, width = token_ids.shape
    keep_all, backup = torch.zeros(batch, dtype=torch.bool), torch.zeros(batch, dtype=torch.int64)

    def call() -> Tensor:
        next_tokens, counts = torch.empty_like(backup), torch.empty_like(backup)
        torch.ops._C.eagle_prepare_next_token_padded_kernel_impl(
            token_ids, keep_all, backup, next_tokens, counts, 2**31 - 1, width, batch
        )
        return counts

    return call


def _draft_probs(inputs: Inputs) -> Tensor | None:
    if inputs.draft_logits is None:
        return None
    temperature = inputs.temperature.repeat_interleave(inputs.case.num_drafts).unsqueeze(1)
    return inputs.draft_logits.float().div(temperature).softmax(dim=1, dtype=torch.float32)


def _spec_decode_metadata(inputs: Inputs) -> Any:
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

    case = inputs.case
    return SpecDecodeMetadata(
        draft_token_ids=inputs.draft_token_ids,
        num_draft_tokens=[case.num_drafts] * case.batch,
        cu_num_draft_tokens=inputs.cu_num_draft_tokens[1:].contiguous(),
        cu_num_sampled_tokens=torch.arange(1, case.batch + 1, dtype=torch.int32) * (case.num_drafts + 1),
        target_logits_indices=inputs.target_rows.int(),
        bonus_logits_indices=inputs.bonus_rows.int(),
        logits_indices=torch.arange(inputs.target_logits.shape[0], dtype=torch.int32),
    )


def _sampling_metadata(inputs: Inputs) -> Any:
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.metadata import SamplingMetadata

    greedy = inputs.case.greedy
    none = torch.empty(0)
    return SamplingMetadata(
        temperature=None if greedy else inputs.temperature,
        all_greedy=greedy,
        all_random=not greedy,
        top_p=None,
        top_k=None,
        generators={},
        max_num_logprobs=None,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=none,
        presence_penalties=none,
        repetition_penalties=none,
        output_token_ids=[[]] * inputs.case.batch,
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(),
    )
