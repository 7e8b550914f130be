"""What requests of vLLM's V1 runner ask of their logits beside temperature, top-k and top-p.

vLLM's own code copies the draft rows and the bonus rows to float32, and the output so far for each of them.
``apply_logit_processors_`` works on the rows as they lie, with one list of the output for each request.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdec_ops.ops.apply_logit_processors import apply_logit_processors_

_NOTHING: Sequence[int] = ()


def change_rows(sampling_metadata: Any) -> bool:
    """Whether any request asks for something of this."""
    return (
        not sampling_metadata.no_penalties
        or sampling_metadata.allowed_token_ids_mask is not None
        or bool(sampling_metadata.bad_words_token_ids)
        or any(processor.min_toks for processor in _min_tokens_processors(sampling_metadata))
    )


def apply(
    rows: Tensor, metadata: Any, totals: Tensor, sampling_metadata: Any, *, in_place: bool = True
) -> Tensor:
    """Penalties, bad words, allowed ids and minimum lengths, on the rows of a step's chains.

    In place and in the dtype of the rows where that is exact, as it is for masks. Penalties are computed in
    float32, as the engine does.

    Args:
        rows: ``[num_drafts + batch, vocab_size]``: for each request its draft rows, then its bonus row.
        metadata: The engine's ``SpecDecodeMetadata``.
        totals: ``[batch + 1]``, the ``cu_num_draft_tokens`` of ``verify_chain``.
        sampling_metadata: The engine's ``SamplingMetadata``.
        in_place: False leaves ``rows`` alone in any case.

    Returns:
        ``rows``, or the copy.
    """
    counts = metadata.num_draft_tokens
    processors = _min_tokens_processors(sampling_metadata)
    # Where a grammar leaves nothing but stop tokens they stay, which the op does not know of.
    engines_own = any(uses_grammar for each in processors for *_, uses_grammar in each.min_toks.values())
    dtype = torch.float32 if not sampling_metadata.no_penalties or engines_own else rows.dtype
    rows = rows.to(dtype, copy=not in_place)
    if sampling_metadata.allowed_token_ids_mask is not None:
        request = request_of_row(tuple(counts)).to(rows.device, non_blocking=True)
        rows.masked_fill_(sampling_metadata.allowed_token_ids_mask[request], -torch.inf)
    min_tokens = (
        {} if engines_own else {r: entry for each in processors for r, entry in each.min_toks.items()}
    )
    lists = _Lists(len(counts), rows.device)
    lists.add_outputs(sampling_metadata)
    lists.add_min_tokens(min_tokens)
    if lists.arguments:
        apply_logit_processors_(rows, metadata.draft_token_ids, totals, **lists.arguments)
    if engines_own:
        for each in processors:
            # It counts draft rows alone, and a bonus row is one more.
            each.apply_with_spec_decode(rows, [count + 1 for count in counts])
    return rows


class _Lists:
    """Arguments of ``apply_logit_processors_``, from the engine's lists."""

    def __init__(self, batch: int, device: torch.device) -> None:
        self.arguments: dict[str, Any] = {}
        self._batch, self._device = batch, device
        self._outputs: list[Sequence[int]] = [_NOTHING] * batch

    def add_outputs(self, sampling_metadata: Any) -> None:
        """Penalties and bad words, which look at the output."""
        words = sampling_metadata.bad_words_token_ids
        if words:
            length = max(len(word) for of_request in words.values() for word in of_request)
            count = max(map(len, words.values()))
            table = np.full((self._batch, count, length), -1)
            for r, of_request in words.items():
                for row, word in zip(table[r], of_request, strict=False):
                    row[: len(word)] = word
            self.arguments["bad_words"] = self._on_device(torch.from_numpy(table))
            for r in words:
                self._outputs[r] = sampling_metadata.output_token_ids[r][-length:]
        if not sampling_metadata.no_penalties:
            self._outputs = sampling_metadata.output_token_ids
            prompts = sampling_metadata.prompt_token_ids
            self.arguments |= {
                "repetition_penalty": sampling_metadata.repetition_penalties,
                "frequency_penalty": sampling_metadata.frequency_penalties,
                "presence_penalty": sampling_metadata.presence_penalties,
                # Padded by an id outside of the vocabulary, which counts as nothing.
                "prompt_token_ids": prompts,
                "prompt_lens": prompts.new_full((self._batch,), prompts.shape[1]),
            }
        if self.arguments:
            self.arguments["output_token_ids"] = self._table(self._outputs)
            self._add_output_lens()

    def add_min_tokens(self, entries: dict[int, tuple[int, Sequence[int], set[int], bool]]) -> None:
        """Minimum lengths, by request: tokens, the output so far, stop tokens; all outputs were added."""
        if not entries:
            return
        least = [0] * self._batch
        stops: list[Collection[int]] = [_NOTHING] * self._batch
        for r, (tokens, output, stops_of_request, _) in entries.items():
            # Of the output less may have been added than there is.
            least[r] = tokens - len(output) + len(self._outputs[r])
            stops[r] = stops_of_request
        self.arguments["min_tokens"] = self._on_device(torch.tensor(least))
        self.arguments["stop_token_ids"] = self._table(stops)
        self._add_output_lens()

    def _add_output_lens(self) -> None:
        self.arguments["output_lens"] = self._on_device(torch.tensor([len(ids) for ids in self._outputs]))

    def _table(self, lists: Sequence[Collection[int]]) -> Tensor:
        """``[batch, n]`` with -1 behind each list."""
        table = np.full((self._batch, max(map(len, lists))), -1)
        for row, ids in zip(table, lists, strict=True):
            row[: len(ids)] = [*ids]
        return self._on_device(torch.from_numpy(table))

    def _on_device(self, values: Tensor) -> Tensor:
        if self._device.type == "cpu":
            return values
        return values.pin_memory().to(self._device, non_blocking=True)


def _min_tokens_processors(sampling_metadata: Any) -> Sequence[Any]:
    """Those for minimum lengths; with drafts the engine has no others."""
    return sampling_metadata.logitsprocs.non_argmax_invariant  # type: ignore[no-any-return]


@functools.lru_cache(maxsize=256)
def request_of_row(num_draft_tokens: tuple[int, ...]) -> Tensor:
    """Whose row each row of the chains is. Kept, since most steps draft alike."""
    return torch.arange(len(num_draft_tokens)).repeat_interleave(torch.tensor(num_draft_tokens) + 1)
