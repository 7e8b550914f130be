"""vLLM's V1 rejection sampler by way of ``verify_chain``: from logits to tokens in one pass.

The engine calls ``RejectionSampler.forward`` with the logits of every draft and bonus row. Its own
code copies them to float32, draws ``[batch, vocab]`` noise, makes softmax tensors and recovers a
token for every draft; ``verify_chain`` reads the rows as they are and stops at the first rejection.

A request draws one 64-bit seed a step, from its own generator if it has one; all random numbers of
the step follow from it. So a seeded request gets the same tokens whatever shares its batch.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from specdec_ops.integrations.vllm import _logit_processors, _report
from specdec_ops.ops.sample import sample
from specdec_ops.ops.verify_chain import verify_chain

#: What a request can ask of the sampler, as far as it is known here. An engine whose metadata has
#: more is not served by `forward`.
KNOWN_SAMPLING_METADATA = frozenset(
    (
        "temperature",
        "all_greedy",
        "all_random",
        "top_p",
        "top_k",
        "generators",
        "max_num_logprobs",
        "no_penalties",
        "prompt_token_ids",
        "frequency_penalties",
        "presence_penalties",
        "repetition_penalties",
        "output_token_ids",
        "allowed_token_ids_mask",
        "bad_words_token_ids",
        "logitsprocs",
        "logprob_token_ids",
        "spec_token_ids",
        "thinking_budget_state_holder",
    )
)

#: Seeds are drawn below this, the largest bound that torch.randint takes.
_LARGEST_SEED = 2**63 - 1


def make_forward(engine: Any, stock: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the replacement for ``RejectionSampler.forward``.

    Args:
        engine: The module ``vllm.v1.sample.rejection_sampler``.
        stock: The method to hand calls over to.
    """

    def forward(
        self: Any, metadata: Any, draft_probs: Tensor | None, logits: Tensor, sampling_metadata: Any
    ) -> Any:
        missing = _missing_feature(engine, self, sampling_metadata)
        if missing:
            _report.hand_over(missing)
            return stock(self, metadata, draft_probs, logits, sampling_metadata)
        _report.calls["RejectionSampler.forward"] += 1
        batch, device = len(metadata.num_draft_tokens), logits.device
        totals = _totals(metadata.num_draft_tokens, metadata.cu_num_draft_tokens)
        temperature = sampling_metadata.temperature
        if sampling_metadata.all_greedy:
            temperature = _zeros(batch, torch.float32, device)
        arguments = _rule_of_sampler(self) | {
            "cu_num_draft_tokens": totals,
            "temperature": temperature,
            "draft_probs": draft_probs,
            "max_num_draft_tokens": metadata.max_spec_len,
        }
        if not sampling_metadata.all_greedy or self.synthetic_mode:
            arguments["seeds"] = _draw_seeds(sampling_metadata.generators, batch, device)
            arguments["positions"] = _zeros(batch, torch.int64, device)

        raw = rows = _chain_rows(metadata, logits)
        shows = sampling_metadata.max_num_logprobs is not None
        if _logit_processors.change_rows(sampling_metadata):
            keep_raw = shows and not self.is_processed_logprobs_mode
            rows = _logit_processors.apply(rows, metadata, totals, sampling_metadata, in_place=not keep_raw)
        if not sampling_metadata.all_greedy:
            arguments |= {"top_k": sampling_metadata.top_k, "top_p": sampling_metadata.top_p}
        token_ids = verify_chain(rows, metadata.draft_token_ids, **arguments).token_ids

        logprobs = None
        if shows:
            shown = raw
            if self.is_processed_logprobs_mode:
                shown = _after_filters(rows, metadata.num_draft_tokens, sampling_metadata)
            logprobs = self._get_logprobs_tensors(
                sampling_metadata.max_num_logprobs,
                metadata,
                shown,
                shown[metadata.target_logits_indices],
                shown[metadata.bonus_logits_indices],
                token_ids,
            )
        return engine.SamplerOutput(sampled_token_ids=token_ids, logprobs_tensors=logprobs)

    return forward


def make_rejection_sample(engine: Any) -> Callable[..., Any]:
    """Returns the replacement for ``rejection_sample``, which serves the calls that ``forward`` hands over.

    Target logits are processed and scaled there, and the bonus tokens are drawn.
    """

    def rejection_sample(
        draft_token_ids: Tensor,
        num_draft_tokens: list[int],
        max_spec_len: int,
        cu_num_draft_tokens: Tensor,
        draft_probs: Tensor | None,
        target_logits: Tensor,
        bonus_token_ids: Tensor,
        sampling_metadata: Any,
        synthetic_mode: bool = False,
        synthetic_conditional_rates: Tensor | None = None,
        use_fp64_gumbel: bool = False,
        fly_window_size: int | None = None,
        fly_entropy_threshold: float | None = None,
        fly_entropy_top_k: int = 3,
    ) -> Tensor:
        # The random numbers have 53 bits, whatever use_fp64_gumbel asks for.
        _report.calls["rejection_sample"] += 1
        arguments = _rule(
            synthetic_conditional_rates if synthetic_mode else None,
            fly_window_size,
            fly_entropy_threshold,
            fly_entropy_top_k,
        )
        if not sampling_metadata.all_greedy or synthetic_mode:
            # Coins are the engine's own: users and tests may put others in their place.
            arguments["accept_uniforms"] = engine.generate_uniform_probs(
                draft_token_ids.shape[0], num_draft_tokens, sampling_metadata.generators, target_logits.device
            )
            arguments["recovered_uniforms"] = _draw_uniforms(
                sampling_metadata.generators, num_draft_tokens, target_logits.device
            )
        temperature: Tensor | float = 0.0
        if not sampling_metadata.all_greedy:
            temperature = (sampling_metadata.temperature != engine.GREEDY_TEMPERATURE).to(torch.float32)
        return verify_chain(
            target_logits,
            draft_token_ids,
            _totals(num_draft_tokens, cu_num_draft_tokens),
            temperature=temperature,
            draft_probs=draft_probs,
            bonus_token_ids=bonus_token_ids.flatten(),
            max_num_draft_tokens=max_spec_len,
            **arguments,
        ).token_ids

    return rejection_sample


def make_init(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Returns ``RejectionSampler.__init__`` that knows block verification, and FLy on CPU.

    The engine's own takes the method ``"block"`` for ``"standard"``, and refuses ``"fly"`` on CPU.
    """

    def __init__(
        self: Any, sampler: Any, spec_config: Any = None, device: torch.device | None = None
    ) -> None:
        method = None if spec_config is None else spec_config.rejection_sample_method
        # CPU is where tensors go without a device, and FLy is refused for this one alone.
        on_cpu = device is not None and device.type == "cpu"
        stock(self, sampler, spec_config, None if method == "fly" and on_cpu else device)
        self.use_block_verification = method == "block"

    return __init__


def make_proposer_init(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the ``__init__`` of vLLM's draft models that keeps draft laws for block verification too.

    The engine's own keeps them for methods that it knows alone, so that all else sees greedy drafts.
    """

    @functools.wraps(stock)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        stock(self, *args, **kwargs)
        config = self.speculative_config
        if config.rejection_sample_method == "block" and config.draft_sample_method == "probabilistic":
            self._enable_probabilistic_draft_probs = True

    return __init__


def _missing_feature(engine: Any, sampler: Any, sampling_metadata: Any) -> str:
    """What `forward` cannot do of what is asked; empty if it can do all of it."""
    if type(sampler) is not engine.RejectionSampler or type(sampler.sampler) is not engine.Sampler:
        return "samplers derived from vLLM's"
    if sampling_metadata.logprob_token_ids:
        return "log-probabilities of tokens that the request names"
    holder = sampling_metadata.thinking_budget_state_holder
    if holder is not None and holder.has_tracked_requests():
        return "thinking budgets"
    processors = sampling_metadata.logitsprocs
    for processor in (*processors.argmax_invariant, *processors.non_argmax_invariant):
        if type(processor) is not engine.MinTokensLogitsProcessor:
            return f"logits processor {type(processor).__name__}"
    return ""


def _after_filters(rows: Tensor, num_draft_tokens: list[int], sampling_metadata: Any) -> Tensor:
    """What processed log-probabilities are of: rows of chains after temperature, top-k and top-p, float32.

    The ids that are left are those that ``verify_chain`` may emit.
    """
    if sampling_metadata.all_greedy:
        return rows
    request = _logit_processors.request_of_row(tuple(num_draft_tokens)).to(rows.device, non_blocking=True)
    temperature = sampling_metadata.temperature
    thresholds = sample(
        rows,
        temperature=temperature,
        uniforms=_zeros(rows.shape[0], torch.float32, rows.device),
        request_indices=request,
        top_k=sampling_metadata.top_k,
        top_p=sampling_metadata.top_p,
    ).thresholds
    scale = temperature.masked_fill(temperature == 0, 1.0)[request].unsqueeze(1)
    return torch.where(rows < thresholds.unsqueeze(1), -torch.inf, rows / scale)


def _chain_rows(metadata: Any, logits: Tensor) -> Tensor:
    """The rows of each request's drafts, then its bonus row: ``logits`` itself where they lie like that.

    The engine's runner lays them like that. On a GPU it is not looked at, which would wait for the device.
    """
    if not logits.is_cpu:
        return logits
    target, bonus = metadata.target_logits_indices.tolist(), metadata.bonus_logits_indices.tolist()
    rows: list[int] = []
    first = 0
    for count, bonus_row in zip(metadata.num_draft_tokens, bonus, strict=True):
        rows += target[first : first + count]
        rows.append(bonus_row)
        first += count
    return logits if rows == list(range(logits.shape[0])) else logits[rows]


def _totals(num_draft_tokens: list[int], cu_num_draft_tokens: Tensor) -> Tensor:
    """``cu_num_draft_tokens`` with its leading 0."""
    if cu_num_draft_tokens.is_cpu:
        return _totals_on_cpu(tuple(num_draft_tokens))
    return torch.nn.functional.pad(cu_num_draft_tokens, (1, 0))


@functools.lru_cache(maxsize=256)
def _totals_on_cpu(num_draft_tokens: tuple[int, ...]) -> Tensor:
    """Kept, since most steps draft alike."""
    return torch.tensor([*itertools.accumulate(num_draft_tokens, initial=0)])


def _zeros(batch: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    # On a GPU a kept tensor might be part of a graph's memory, and nothing is saved.
    return (
        _zeros_on_cpu(batch, dtype)
        if device.type == "cpu"
        else torch.zeros(batch, dtype=dtype, device=device)
    )


@functools.lru_cache(maxsize=256)
def _zeros_on_cpu(batch: int, dtype: torch.dtype) -> Tensor:
    """Nobody writes to it."""
    return torch.zeros(batch, dtype=dtype)


def _draw_seeds(generators: dict[int, torch.Generator], batch: int, device: torch.device) -> Tensor:
    """A fresh seed for each request, from its own generator if it has one."""
    seeds = torch.randint(_LARGEST_SEED, (batch,), device=device)
    for r, generator in generators.items():
        seeds[r].random_(generator=generator)
    return seeds


def _draw_uniforms(
    generators: dict[int, torch.Generator], num_draft_tokens: list[int], device: torch.device
) -> Tensor:
    """A number for the recovered token of each request, from its own generator if it has one.

    A request without drafts draws nothing, so that its generator is where the engine expects it.
    """
    uniforms = torch.rand(len(num_draft_tokens), dtype=torch.float64, device=device)
    for r, generator in generators.items():
        if num_draft_tokens[r] > 0:
            uniforms[r].uniform_(generator=generator)
    return uniforms


def _rule_of_sampler(sampler: Any) -> dict[str, Any]:
    # Looked up in the dictionary: a module that lacks an attribute takes long to say so.
    own = sampler.__dict__
    if own.get("use_block_verification"):
        return {"rule": "block"}
    return _rule(
        sampler.synthetic_conditional_rates if sampler.synthetic_mode else None,
        own.get("fly_window_size"),
        own.get("fly_entropy_threshold"),
        own.get("fly_entropy_top_k", 3),
    )


def _rule(
    rates: Tensor | None, fly_window_size: int | None, fly_entropy_threshold: float | None, fly_top_k: int
) -> dict[str, Any]:
    """The arguments of ``verify_chain`` for the engine's ``rejection_sample_method``."""
    if rates is not None:
        return {"accept_rates": rates}
    if fly_window_size is not None:
        return {
            "fly_window_size": fly_window_size,
            "fly_entropy_threshold": fly_entropy_threshold,
            "fly_entropy_top_k": fly_top_k,
        }
    return {}
