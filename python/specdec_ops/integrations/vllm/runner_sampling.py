"""The sampling of vLLM's newer model runner (V2) by way of ``verify_chain`` and ``sample``.

The signatures are those of vLLM 0.33, which take what 0.32 passes too. Nothing here waits for the device, and
all of it can be captured in a graph.

The runner keeps temperatures, seeds and draft logits for each request that it holds, and says for a batch or
for its rows which entry is whose (``idx_mapping``, ``expanded_idx_mapping``). The ops read them where they
are. A row of logits is that of an input token: the last one that a request has emitted, then its drafts. So
draft i of a request is the input of its row i + 1, and row i verifies it.

``pos`` is the position of a row's input token. Keyed by it, both functions draw the same for a request that
has no drafts. A draft is keyed by its place in the chain as well.

What a request asks of its logits is done before these two are called, by methods of the engine's samplers.
Their replacements leave temperature, top-k, top-p and min-p to the ops.

By default ``gumbel_sample`` stays vLLM's. Its noise is a murmur hash of seed, position and token, and
verification draws from Philox, so a draft and the coin that judges it share no random numbers either way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from specdec_ops.integrations.vllm import _report
from specdec_ops.ops.sample import sample
from specdec_ops.ops.verify_chain import verify_chain

#: The largest `fly_entropy_top_k` of ``verify_chain``.
_MAX_FLY_TOP_K = 64
_FLOAT64_NOISE = "Gumbel noise in float64"


def make_rejection_sample(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the replacement for ``rejection_sample``.

    Args:
        stock: The function to hand calls over to.
    """

    def rejection_sample(
        target_logits: Tensor,
        draft_logits: Tensor | None,
        draft_sampled: Tensor,
        cu_num_logits: Tensor,
        pos: Tensor,
        idx_mapping: Tensor,
        expanded_idx_mapping: Tensor,
        expanded_local_pos: Tensor,
        temperature: Tensor,
        seed: Tensor,
        num_speculative_steps: int,
        synthetic_conditional_rates: Tensor | None = None,
        use_fp64: bool = False,
        use_block_verification: bool = False,
        contexts: Tensor | None = None,
        watermarking: Tensor | None = None,
        watermarking_skip_mask: Tensor | None = None,
        watermark_key: int | None = None,
        fly_window_size: int = 0,
        fly_entropy_threshold: float = 0.3,
        fly_entropy_top_k: int = 3,
    ) -> tuple[Tensor, Tensor]:
        fly: dict[str, Any] = {}
        if fly_window_size > 0:
            fly = {
                "fly_window_size": fly_window_size,
                "fly_entropy_threshold": fly_entropy_threshold,
                "fly_entropy_top_k": fly_entropy_top_k,
            }
        missing = (
            "watermarks"
            if contexts is not None
            else _FLOAT64_NOISE
            if use_fp64
            else f"FLy entropy of more than {_MAX_FLY_TOP_K} ids"
            if fly and fly_entropy_top_k > _MAX_FLY_TOP_K
            else ""
        )
        if missing:
            _report.hand_over(missing)
            return stock(  # type: ignore[no-any-return]
                target_logits,
                draft_logits,
                draft_sampled,
                cu_num_logits,
                pos,
                idx_mapping,
                expanded_idx_mapping,
                expanded_local_pos,
                temperature,
                seed,
                num_speculative_steps,
                synthetic_conditional_rates,
                use_fp64=use_fp64,
                use_block_verification=use_block_verification,
                contexts=contexts,
                watermarking=watermarking,
                watermarking_skip_mask=watermarking_skip_mask,
                watermark_key=watermark_key,
                **fly,
            )
        _report.calls["rejection_sample (V2)"] += 1

        return _verify_rows(
            target_logits,
            draft_logits,
            draft_sampled,
            cu_num_logits,
            pos,
            idx_mapping,
            num_speculative_steps,
            # The target's logits are scaled already, the draft's are not.
            temperature=temperature.sign(),
            draft_temperature=temperature,
            seeds=seed,
            accept_rates=synthetic_conditional_rates,
            rule="block" if use_block_verification else "token",
            **fly,
        )

    return rejection_sample


def make_gumbel_sample(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the replacement for ``gumbel_sample``.

    Args:
        stock: The function to hand calls over to.
    """

    def gumbel_sample(
        logits: Tensor,
        expanded_idx_mapping: Tensor,
        temperature: Tensor,
        seed: Tensor,
        pos: Tensor,
        apply_temperature: bool,
        is_drafting: bool,
        logits_cache: Tensor | None = None,
        logits_cache_col: Tensor | None = None,
        use_fp64: bool = False,
        logits_cache_source: Tensor | None = None,
    ) -> Tensor:
        source = logits if logits_cache_source is None else logits_cache_source
        # What the engine refuses to cache is refused by its own code.
        refused = (
            logits_cache_source is not None
            if logits_cache is None
            else logits_cache_col is None
            or source.shape != logits.shape
            or source.dtype != logits_cache.dtype
            or source.device != logits.device
            or logits_cache.shape[-1] < logits.shape[1]
        )
        if use_fp64 or refused:
            _report.hand_over(_FLOAT64_NOISE if use_fp64 else "caches of such logits")
            return stock(  # type: ignore[no-any-return]
                logits,
                expanded_idx_mapping,
                temperature,
                seed,
                pos,
                apply_temperature=apply_temperature,
                is_drafting=is_drafting,
                logits_cache=logits_cache,
                logits_cache_col=logits_cache_col,
                use_fp64=use_fp64,
                logits_cache_source=logits_cache_source,
            )
        _report.calls["gumbel_sample (V2)"] += 1

        place: Tensor | int = 0
        if logits_cache is not None and logits_cache_col is not None:
            # A position is drafted again after a rejection before it: by another place in the chain.
            place = logits_cache_col
            _cache_rows(logits_cache, source, expanded_idx_mapping, logits_cache_col)
        return sample(
            logits,
            temperature=temperature if apply_temperature else temperature.sign(),
            seeds=seed,
            positions=pos,
            # -1 marks rows of no request, the padding of a graph.
            request_indices=expanded_idx_mapping,
            draft_slot=place if is_drafting else None,
        ).token_ids

    return gumbel_sample


def make_verify(
    stock: Callable[..., Any], make_context: Callable[..., Any], sampler_class: Any
) -> Callable[..., Any]:
    """Returns the replacement for ``RejectionSampler._verify``, which hands filters on as they are.

    The engine's own copies the logits to float32, and scales, sorts and masks them, before it verifies.

    Args:
        stock: The method to hand calls over to.
        make_context: The engine's ``LogitsContext``, for what else is done to logits.
        sampler_class: The class of the samplers that are served; watermarks have one derived from it.
    """

    def _verify(
        self: Any,
        logits: Tensor,
        draft_logits: Tensor | None,
        draft_sampled: Tensor,
        pos: Tensor,
        cu_num_logits: Tensor,
        idx_mapping: Tensor,
        idx_mapping_np: Any,
        expanded_idx_mapping: Tensor,
        expanded_local_pos: Tensor,
        seq_lens_upper_bound_np: Any,
        verify_draft_sampled: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        sampler, states = self.sampler, self.sampler.sampling_states
        fly_window_size = getattr(self, "fly_window_size", 0)
        if (
            type(sampler) is not sampler_class
            or not sampler.needs_logits_processing[idx_mapping_np].any()
            or _shows_processed(sampler, (states.num_logprobs[idx_mapping_np] >= 0).any())
            # What ``rejection_sample`` hands over is handed over by it.
            or self.watermark_key is not None
            or sampler.use_fp64_gumbel
            or (fly_window_size > 0 and self.fly_entropy_top_k > _MAX_FLY_TOP_K)
        ):
            return stock(  # type: ignore[no-any-return]
                self,
                logits,
                draft_logits,
                draft_sampled,
                pos,
                cu_num_logits,
                idx_mapping,
                idx_mapping_np,
                expanded_idx_mapping,
                expanded_local_pos,
                seq_lens_upper_bound_np,
                verify_draft_sampled,
            )
        _report.calls["RejectionSampler._verify (V2)"] += 1
        rows = _processed(
            sampler,
            logits,
            make_context,
            expanded_idx_mapping=expanded_idx_mapping,
            idx_mapping=idx_mapping,
            idx_mapping_np=idx_mapping_np,
            expanded_local_pos=expanded_local_pos,
            input_ids=draft_sampled,
            pos=pos,
            seq_lens_upper_bound_np=seq_lens_upper_bound_np,
        )
        rule: dict[str, Any] = {"rule": "block" if self.use_block_verification else "token"}
        if fly_window_size > 0:
            rule = {
                "fly_window_size": fly_window_size,
                "fly_entropy_threshold": self.fly_entropy_threshold,
                "fly_entropy_top_k": self.fly_entropy_top_k,
            }
        token_ids, num_sampled = _verify_rows(
            rows,
            draft_logits,
            verify_draft_sampled,
            cu_num_logits,
            pos,
            idx_mapping,
            self.num_speculative_steps,
            temperature=states.temperature.gpu,
            seeds=states.seeds.gpu,
            accept_rates=self.synthetic_conditional_rates,
            **_filters(states, idx_mapping_np),
            **rule,
        )
        return rows, token_ids, num_sampled

    return _verify


def make_sample(
    stock: Callable[..., Any], make_context: Callable[..., Any], sampler_class: Any
) -> Callable[..., Any]:
    """Returns the replacement for ``Sampler.sample``: what ``make_verify`` is, for steps without drafts.

    Args:
        stock: The method to hand calls over to.
        make_context: The engine's ``LogitsContext``, for what else is done to logits.
        sampler_class: As in ``make_verify``.
    """

    def sample_step(
        self: Any,
        logits: Tensor,
        expanded_idx_mapping: Tensor,
        idx_mapping: Tensor,
        idx_mapping_np: Any,
        pos: Tensor,
        input_ids: Tensor,
        expanded_local_pos: Tensor,
        seq_lens_upper_bound_np: Any,
        return_logprobs: bool = False,
    ) -> tuple[Tensor, Tensor]:
        if (
            type(self) is not sampler_class
            or not self.needs_logits_processing[idx_mapping_np].any()
            or _shows_processed(self, return_logprobs)
            or self.use_fp64_gumbel
        ):
            return stock(  # type: ignore[no-any-return]
                self,
                logits,
                expanded_idx_mapping,
                idx_mapping,
                idx_mapping_np,
                pos,
                input_ids,
                expanded_local_pos,
                seq_lens_upper_bound_np,
                return_logprobs=return_logprobs,
            )
        _report.calls["Sampler.sample (V2)"] += 1
        rows = _processed(
            self,
            logits,
            make_context,
            expanded_idx_mapping=expanded_idx_mapping,
            idx_mapping=idx_mapping,
            idx_mapping_np=idx_mapping_np,
            expanded_local_pos=expanded_local_pos,
            input_ids=input_ids,
            pos=pos,
            seq_lens_upper_bound_np=seq_lens_upper_bound_np,
        )
        states = self.sampling_states
        drawn = sample(
            rows,
            temperature=states.temperature.gpu,
            seeds=states.seeds.gpu,
            positions=pos,
            request_indices=expanded_idx_mapping,
            **_filters(states, idx_mapping_np),
        )
        return drawn.token_ids, rows

    return sample_step


def _verify_rows(
    target_logits: Tensor,
    draft_logits: Tensor | None,
    draft_sampled: Tensor,
    cu_num_logits: Tensor,
    pos: Tensor,
    idx_mapping: Tensor,
    num_speculative_steps: int,
    **arguments: Any,
) -> tuple[Tensor, Tensor]:
    """``verify_chain`` of rows that lie as the runner's; tokens, and how many of each request."""
    drafts = _Drafts(cu_num_logits, target_logits.shape[0], num_speculative_steps)
    vocab_size = target_logits.shape[1]
    if draft_logits is not None:
        # One of the two may be padded to a wider vocabulary.
        vocab_size = min(vocab_size, draft_logits.shape[2])
    token_ids, num_accepted, *_ = verify_chain(
        target_logits,
        drafts.of_rows(draft_sampled).to(torch.int64),
        drafts.totals,
        draft_logits=draft_logits,
        positions=drafts.first_of_rows(pos, cu_num_logits),
        request_indices=idx_mapping,
        vocab_size=vocab_size,
        max_num_draft_tokens=num_speculative_steps,
        **arguments,
    )
    return token_ids, num_accepted + 1


def _shows_processed(sampler: Any, logprobs: Any) -> bool:
    """Whether somebody looks at the logits after filters: then the engine's own code makes them."""
    return bool(sampler.return_sampling_mask or (logprobs and sampler.logprobs_mode.startswith("processed")))


def _filters(states: Any, idx_mapping_np: Any) -> dict[str, Any]:
    """The filters that some request of the batch has, kept for each request that the engine holds."""
    off = {"top_k": states.vocab_size, "top_p": 1.0, "min_p": 0.0}
    kept = {name: getattr(states, name) for name in off}
    return {name: kept[name].gpu for name in off if (kept[name].np[idx_mapping_np] != off[name]).any()}


#: How a logits processor of the engine, by its class, says that it has something to do for a request.
_ASKED: dict[str, Callable[[Any], Any]] = {
    "PenaltiesState": lambda state: state.use_penalty,
    "LogitBiasState": lambda state: state.use_logit_bias,
    "BadWordsState": lambda state: state.num_bad_words.np > 0,
}


def _processed(sampler: Any, logits: Tensor, make_context: Callable[..., Any], **context: Any) -> Tensor:
    """The logits after what the engine does to them before temperature, if anything in a float32 copy."""
    requests = context["idx_mapping_np"]
    budget = sampler.thinking_budget_state
    if not any(
        # Of others, which users bring, nothing is known.
        (type(each).__name__ not in _ASKED or _ASKED[type(each).__name__](each)[requests].any())
        for each in sampler.logits_processors
    ) and not (budget.enabled and budget.use_thinking_budget[requests].any()):
        return logits
    rows, of_batch = logits.to(torch.float32, copy=True), make_context(**context)
    for each in sampler.logits_processors:
        rows = each.apply(rows, of_batch)
    budget.apply(rows, of_batch)
    return rows


class _Drafts:
    """Where the drafts of a batch are among its rows, known without looking at a tensor's values."""

    def __init__(self, cu_num_logits: Tensor, num_rows: int, most: int) -> None:
        self._num_requests = cu_num_logits.shape[0] - 1
        self._most = most
        device, dtype = cu_num_logits.device, cu_num_logits.dtype
        # No request has more than `most`, so that many rows are there only if each has exactly as many.
        self._all_alike = num_rows == self._num_requests * (most + 1)
        #: ``[num_requests + 1]``, the ``cu_num_draft_tokens`` of ``verify_chain``.
        self.totals: Tensor
        if self._all_alike:
            self.totals = torch.arange(0, (self._num_requests + 1) * most, most, dtype=dtype, device=device)
            return
        self.totals = cu_num_logits - torch.arange(self._num_requests + 1, dtype=dtype, device=device)
        drafts = torch.arange(num_rows - self._num_requests, dtype=dtype, device=device)
        # The row whose input a draft is: behind the first rows of its own request and of those before.
        self._rows = drafts + torch.searchsorted(self.totals, drafts, right=True)

    def of_rows(self, values: Tensor) -> Tensor:
        """Those of ``[num_rows]`` values that belong to drafts."""
        if self._all_alike:
            return values.view(self._num_requests, self._most + 1)[:, 1:].reshape(-1)
        return values.index_select(0, self._rows)

    def first_of_rows(self, values: Tensor, cu_num_logits: Tensor) -> Tensor:
        """Of ``[num_rows]`` values each request's first."""
        if self._all_alike:
            return values[:: self._most + 1]
        return values.index_select(0, cu_num_logits[:-1])


def _cache_rows(cache: Tensor, rows: Tensor, slots: Tensor, columns: Tensor) -> None:
    """Sets ``cache[slots[t], columns[t]]`` to row t, bit for bit, where the slot is not -1."""
    width = rows.shape[1]
    written = slots >= 0
    tokens = torch.arange(len(slots), device=slots.device)
    # Which rows are left out is known on the device alone. In the place of one of them another is written
    # again, or what is there already, if all are left out.
    tokens = torch.where(written, tokens, written.to(torch.int8).argmax(0, keepdim=True))
    where = (slots.clamp(min=0)[tokens].long(), columns.expand(len(slots))[tokens].long())
    cache = cache[..., :width]
    cache.index_put_(where, torch.where(written[tokens, None], rows[tokens], cache[where]))


_GPU = "vllm.v1.worker.gpu"

#: The classes whose ``_verify`` and ``sample`` are replaced, the latter where the user asks for all, and what
#: they hand to logits processors.
VERIFIER = f"{_GPU}.spec_decode.rejection_sampler.RejectionSampler"
SAMPLER = f"{_GPU}.sample.sampler.Sampler"
CONTEXT = f"{_GPU}.sample.logits_processor.interface.LogitsContext"

#: What makes the replacement of which function of vLLM, by its qualified name.
FUNCTIONS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    f"{_GPU}.spec_decode.rejection_sampler_utils.rejection_sample": make_rejection_sample,
    f"{_GPU}.sample.gumbel.gumbel_sample": make_gumbel_sample,
}

#: Those that are replaced only where the user asks for all: vLLM's own follow the same law, and are mostly
#: faster.
IF_ALL = frozenset({f"{_GPU}.sample.gumbel.gumbel_sample"})

#: The modules that import those functions by name, and so hold copies that have to be replaced too.
IMPORTERS: dict[str, tuple[str, ...]] = {
    f"{_GPU}.spec_decode.rejection_sampler_utils.rejection_sample": (
        f"{_GPU}.spec_decode.rejection_sampler",
        "vllm.v1.watermarking.spec_decode",
    ),
    f"{_GPU}.sample.gumbel.gumbel_sample": (
        f"{_GPU}.sample.sampler",
        f"{_GPU}.spec_decode.speculator",
        f"{_GPU}.spec_decode.dspark.speculator",
        "vllm.v1.watermarking.watermarker",
    ),
}
