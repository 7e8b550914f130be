"""apply_logit_processors_: biases, penalties and masks on rows of logits, at each draft position."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdec_ops._library import define
from specdec_ops.ops._arguments import draft_totals, leading_size, per_request


def apply_logit_processors_(
    logits: Tensor,
    draft_token_ids: Tensor | None = None,
    cu_num_draft_tokens: Tensor | None = None,
    *,
    logit_bias_ids: Tensor | None = None,
    logit_bias: Tensor | None = None,
    repetition_penalty: Tensor | float | None = None,
    frequency_penalty: Tensor | float | None = None,
    presence_penalty: Tensor | float | None = None,
    prompt_token_ids: Tensor | None = None,
    prompt_lens: Tensor | None = None,
    output_token_ids: Tensor | None = None,
    output_lens: Tensor | None = None,
    allowed_token_ids: Tensor | None = None,
    grammar_bitmask: Tensor | None = None,
    min_tokens: Tensor | None = None,
    stop_token_ids: Tensor | None = None,
    bad_words: Tensor | None = None,
    vocab_size: int | None = None,
) -> None:
    """Changes the rows that ``verify_chain`` or ``sample`` is about to read, in place.

    The row in slot i of a request is for the token behind its output so far and its drafts in slots before
    i: these count as output there, for penalties, bad words and the least number of tokens. What a rejected
    draft did to later rows does not matter, since they are not read; nothing has a state that would have to
    be rolled back.

    The order is that below: biases, penalties, masks. Biases and penalties are computed in float32, each
    rounded once to the dtype of the rows; ids that nothing applies to keep their bits. Masks write ``-inf``.

    Args:
        logits: ``[num_drafts + batch, width]`` float32, bfloat16 or float16, any row stride; written. A row
            for each draft and one more, request by request, as ``verify_chain`` takes them.
        draft_token_ids: ``[num_drafts]`` int32 or int64. -1 and other ids outside ``[0, vocab_size)`` count
            as no token. Default, together with the next: no request has drafts, as for ``sample``.
        cu_num_draft_tokens: ``[batch + 1]`` or ``[batch]`` int32 or int64, running totals.
        logit_bias_ids: ``[batch, n]`` int32 or int64: ids whose logits get a bias. Here and in all lists of
            ids that follow, what is outside ``[0, vocab_size)`` counts as nothing: pad with -1. Of an id
            that is listed twice, the first bias counts.
        logit_bias: ``[batch, n]`` float32, their biases.
        repetition_penalty: ``[batch]`` float32 or a number for all, positive: a logit above 0 of an id in the
            prompt or the output is divided by it, another multiplied. Default: 1, which changes nothing.
        frequency_penalty: Likewise, any number: subtracted for each time that the id occurs in the output.
            Default: 0.
        presence_penalty: Likewise: subtracted if the id occurs in the output. Default: 0.
        prompt_token_ids: ``[batch, p]`` int32 or int64, the prompts.
        prompt_lens: ``[batch]`` int32 or int64, how many tokens of each prompt there are.
        output_token_ids: ``[batch, o]`` int32 or int64, the outputs so far.
        output_lens: ``[batch]`` int32 or int64, how many tokens of each output there are. Needed with
            ``output_token_ids`` and with ``min_tokens``.
        allowed_token_ids: ``[batch, n]`` int32 or int64: all other ids are masked. A request without any is
            free.
        grammar_bitmask: ``[num_drafts + batch, words]`` int32, any strides, ``words`` at least
            ``ceil(vocab_size / 32)``: bit ``id % 32`` of word ``id // 32`` is 1 where the row's grammar
            allows the id, as xgrammar packs it. -1 in all words masks nothing.
        min_tokens: ``[batch]`` int32 or int64, the least number of tokens of an output: stop tokens are
            masked in slot i where the output's length and i make less.
        stop_token_ids: ``[batch, n]`` int32 or int64, end-of-sequence and other stop tokens.
        bad_words: ``[batch, words, length]`` int32 or int64: sequences of tokens that must not appear in the
            output, each ended by a negative id if it is shorter than ``length``. The last token of a word is
            masked where the tokens before it, output and drafts, are the rest of the word.
        vocab_size: Columns from here on are padding and not touched. Default: the width.

    Raises:
        RuntimeError: An argument has the wrong shape, dtype, device or range, or one is given without what it
            needs; the message names it. On an accelerator nobody looks at values: lengths are held inside of
            the lists, penalties used as they are.

    A row may end fully masked; ``verify_chain`` and ``sample`` say so by ``Status.MASKED_TARGET``. NaN stays
    NaN unless it is masked.

    Source: repetition penalty by Keskar et al., arXiv 1909.05858; the others, and the order of penalties, as
    vLLM applies them.

    Example:
        >>> import torch, specdec_ops
        >>> logits = torch.zeros(3, 4)  # one request with two drafts
        >>> specdec_ops.apply_logit_processors_(
        ...     logits, torch.tensor([2, 2]), torch.tensor([0, 2]), frequency_penalty=0.5
        ... )
        >>> logits[:, 2].tolist()
        [0.0, -0.5, -1.0]
    """
    name = "apply_logit_processors_"
    batch = leading_size(name, "logits", logits)
    if isinstance(draft_token_ids, Tensor):
        batch -= leading_size(name, "draft_token_ids", draft_token_ids)
    penalties: dict[str, Tensor | None] = {}
    given = {
        "repetition_penalty": (repetition_penalty, 1.0),
        "frequency_penalty": (frequency_penalty, 0.0),
        "presence_penalty": (presence_penalty, 0.0),
    }
    if any(value is not None for value, _ in given.values()):
        for key, (value, neutral) in given.items():
            penalties[key] = per_request(neutral if value is None else value, batch, torch.float32, logits)
    bad_word_width = 1
    if bad_words is not None:
        if bad_words.dim() != 3:
            raise RuntimeError(
                f"{name}: bad_words must be [batch, words, length], got shape {list(bad_words.shape)}"
            )
        bad_word_width = max(bad_words.shape[2], 1)
        bad_words = bad_words.flatten(1)
    _op(
        logits,
        draft_token_ids,
        cu_num_draft_tokens,
        logit_bias_ids=logit_bias_ids,
        logit_bias=logit_bias,
        **penalties,
        prompt_token_ids=prompt_token_ids,
        prompt_lens=prompt_lens,
        output_token_ids=output_token_ids,
        output_lens=output_lens,
        bad_words=bad_words,
        bad_word_width=bad_word_width,
        min_tokens=min_tokens,
        stop_token_ids=stop_token_ids,
        allowed_token_ids=allowed_token_ids,
        grammar_bitmask=grammar_bitmask,
        vocab_size=vocab_size,
    )


def _reference(
    logits: Tensor,
    draft_token_ids: Tensor | None = None,
    cu_num_draft_tokens: Tensor | None = None,
    *,
    bad_word_width: int = 1,
    vocab_size: int | None = None,
    **lists: Any,
) -> None:
    size = logits.shape[1] if vocab_size is None else vocab_size
    drafts = [] if draft_token_ids is None else draft_token_ids.tolist()
    batch = logits.shape[0] - len(drafts)
    begins = [0] * (batch + 1) if cu_num_draft_tokens is None else draft_totals(cu_num_draft_tokens, batch)

    def of_request(name: str, request: int) -> list[int]:
        return lists[name][request].tolist() if lists.get(name) is not None else []

    def ids_of(name: str, request: int) -> list[int]:
        return [i for i in of_request(name, request) if 0 <= i < size]

    def tokens_of(name: str, request: int) -> list[int]:
        if lists.get(f"{name}_token_ids") is None:
            return []
        return of_request(f"{name}_token_ids", request)[: int(lists[f"{name}_lens"][request])]

    for request in range(batch):
        own = drafts[begins[request] : begins[request + 1]]
        for slot in range(len(own) + 1):
            index = begins[request] + request + slot
            row = logits[index]
            output = tokens_of("output", request) + own[:slot]

            biases: dict[int, float] = {}
            if lists.get("logit_bias") is not None:
                values: list[float] = lists["logit_bias"][request].tolist()
                pairs = zip(of_request("logit_bias_ids", request), values, strict=True)
                for i, bias in pairs:
                    biases.setdefault(i, bias)
            for i, bias in biases.items():
                if 0 <= i < size:
                    row[i] = float(row[i]) + bias

            if lists.get("repetition_penalty") is not None:
                repetition = float(lists["repetition_penalty"][request])
                frequency = float(lists["frequency_penalty"][request])
                presence = float(lists["presence_penalty"][request])
                is_neutral = (repetition, frequency, presence) == (1.0, 0.0, 0.0)
                seen = set() if is_neutral else {*tokens_of("prompt", request), *output}
                for i in seen:
                    if 0 <= i < size:
                        x = float(row[i])
                        x = x / repetition if x > 0 else x * repetition
                        count = output.count(i)
                        row[i] = x - frequency * count - presence * (count > 0)

            allowed = ids_of("allowed_token_ids", request)
            masked = np.zeros(size, dtype=bool)
            if allowed:
                masked[:] = True
                masked[allowed] = False
            if lists.get("grammar_bitmask") is not None:
                words = lists["grammar_bitmask"][index].cpu().numpy().astype(np.uint32)
                bits = np.unpackbits(words.view(np.uint8), bitorder="little")[:size]
                masked |= bits == 0
            if lists.get("min_tokens") is not None and (
                int(lists["output_lens"][request]) + slot < int(lists["min_tokens"][request])
            ):
                masked[ids_of("stop_token_ids", request)] = True
            words_of_request = of_request("bad_words", request)
            for begin in range(0, len(words_of_request), bad_word_width):
                word = words_of_request[begin : begin + bad_word_width]
                word = word[: next((i for i, token in enumerate(word) if token < 0), len(word))]
                if word and 0 <= word[-1] < size and output[len(output) - len(word) + 1 :] == word[:-1]:
                    masked[word[-1]] = True
            row[:size][torch.from_numpy(masked).to(logits.device)] = -math.inf


_op = define(
    "apply_logit_processors_(Tensor(a!) logits, Tensor? draft_token_ids=None, "
    "Tensor? cu_num_draft_tokens=None, *, Tensor? logit_bias_ids=None, Tensor? logit_bias=None, "
    "Tensor? repetition_penalty=None, Tensor? frequency_penalty=None, Tensor? presence_penalty=None, "
    "Tensor? prompt_token_ids=None, Tensor? prompt_lens=None, Tensor? output_token_ids=None, "
    "Tensor? output_lens=None, Tensor? bad_words=None, SymInt bad_word_width=1, Tensor? min_tokens=None, "
    "Tensor? stop_token_ids=None, Tensor? allowed_token_ids=None, Tensor? grammar_bitmask=None, "
    "SymInt? vocab_size=None) -> ()",
    reference=_reference,
)
