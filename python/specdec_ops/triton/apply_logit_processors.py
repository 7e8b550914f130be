"""apply_logit_processors_ in Triton: launches follow each other, for biases, penalties and masks."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_ops.triton._checks import Checks, count_of, num_blocks, shape_of
from specdec_ops.triton._launch import kernel, launch
from specdec_ops.triton._views import (
    clamped,
    drafts_of,
    is_present,
    load_int,
    load_int_at,
    load_real,
    rounded,
    word_rows,
    words,
)

#: Entries of lists of a program, tokens that a program penalises at a time, ids that it masks.
_ENTRIES, _TOKENS, _IDS = 128, 256, 1024
#: Programs that penalise. Each has a table of the vocabulary, for one request after another.
_MAX_TABLES = 128
#: Of an id's count: it occurs in the prompt, and it was penalised.
_IN_PROMPT, _IS_DONE = tl.constexpr(1 << 29), tl.constexpr(1 << 30)
_COUNT = tl.constexpr((1 << 29) - 1)


def apply_logit_processors_(
    logits: Tensor,
    draft_token_ids: Tensor | None = None,
    cu_num_draft_tokens: Tensor | None = None,
    *,
    logit_bias_ids: Tensor | None = None,
    logit_bias: Tensor | None = None,
    repetition_penalty: Tensor | None = None,
    frequency_penalty: Tensor | None = None,
    presence_penalty: Tensor | None = None,
    prompt_token_ids: Tensor | None = None,
    prompt_lens: Tensor | None = None,
    output_token_ids: Tensor | None = None,
    output_lens: Tensor | None = None,
    bad_words: Tensor | None = None,
    bad_word_width: int = 1,
    min_tokens: Tensor | None = None,
    stop_token_ids: Tensor | None = None,
    allowed_token_ids: Tensor | None = None,
    grammar_bitmask: Tensor | None = None,
    vocab_size: int | None = None,
) -> None:
    """See :func:`specdec_ops.apply_logit_processors_`."""
    checks = Checks("apply_logit_processors_")
    checks.row_dtype(logits, "logits")
    checks.dims(logits, "logits", "[num_drafts + batch, width]", 2)
    checks.contiguous_rows(logits, "logits")
    num_rows = batch = logits.shape[0]
    size = checks.vocab_size(vocab_size, logits, "logits")

    _together(checks, draft_token_ids=draft_token_ids, cu_num_draft_tokens=cu_num_draft_tokens)
    num_drafts, ends = 0, None
    if draft_token_ids is not None and cu_num_draft_tokens is not None:
        checks.integer(draft_token_ids, "draft_token_ids")
        if draft_token_ids.dim() != 1 or draft_token_ids.shape[0] > num_rows:
            checks.fail(
                f"draft_token_ids must be [num_drafts] with at most {count_of(num_rows, 'element')}, "
                f"got {shape_of(draft_token_ids)}"
            )
        num_drafts = draft_token_ids.shape[0]
        batch = num_rows - num_drafts
        ends = checks.draft_ends(cu_num_draft_tokens, batch)

    _together(checks, logit_bias_ids=logit_bias_ids, logit_bias=logit_bias)
    _id_lists(checks, logit_bias_ids, "logit_bias_ids", batch)
    if logit_bias is not None and logit_bias_ids is not None:
        checks.float32(logit_bias, "logit_bias")
        if logit_bias.shape != logit_bias_ids.shape:
            checks.fail(
                f"logit_bias must have the shape of logit_bias_ids, {shape_of(logit_bias_ids)}, "
                f"got {shape_of(logit_bias)}"
            )

    _together(checks, prompt_token_ids=prompt_token_ids, prompt_lens=prompt_lens)
    if output_token_ids is not None and output_lens is None:
        checks.fail("output_lens must be given with output_token_ids, got output_token_ids alone")
    for ids, lens, name in (
        (prompt_token_ids, prompt_lens, "prompt"),
        (output_token_ids, output_lens, "output"),
    ):
        if lens is not None:
            checks.ints(lens, f"{name}_lens", "[batch]", batch)
        _id_lists(checks, ids, f"{name}_token_ids", batch)

    penalties = (repetition_penalty, frequency_penalty, presence_penalty)
    if len({penalty is None for penalty in penalties}) > 1:
        checks.fail(
            "repetition_penalty, frequency_penalty and presence_penalty must be given together, got some"
        )
    names = ("repetition_penalty", "frequency_penalty", "presence_penalty")
    for penalty, name in zip(penalties, names, strict=True):
        if penalty is not None:
            checks.float32_vector(penalty, name, "[batch]", batch)

    _together(checks, min_tokens=min_tokens, stop_token_ids=stop_token_ids)
    if min_tokens is not None and output_lens is None:
        checks.fail("output_lens must be given with min_tokens, got min_tokens alone")
    _id_lists(checks, stop_token_ids, "stop_token_ids", batch)
    if min_tokens is not None:
        checks.ints(min_tokens, "min_tokens", "[batch]", batch)
    _id_lists(checks, allowed_token_ids, "allowed_token_ids", batch)
    _id_lists(checks, bad_words, "bad_words", batch)
    if bad_words is not None and (bad_word_width < 1 or bad_words.shape[1] % bad_word_width != 0):
        checks.fail(f"bad_words must have rows of whole words of {bad_word_width}, got {shape_of(bad_words)}")
    num_words = num_blocks(size, 32)
    if grammar_bitmask is not None:
        checks.dtype(grammar_bitmask, "grammar_bitmask", (torch.int32,), "int32")
        if (
            grammar_bitmask.dim() != 2
            or grammar_bitmask.shape[0] != num_rows
            or grammar_bitmask.shape[1] < num_words
        ):
            checks.fail(
                f"grammar_bitmask must be [num_drafts + batch, words] with {count_of(num_rows, 'row')} of "
                f"at least {count_of(num_words, 'word')}, got {shape_of(grammar_bitmask)}"
            )
    if num_rows == 0:
        return

    rows = (
        logits,
        logits.stride(0),
        batch,
        num_drafts,
        size,
        *words(ends, logits),
        *words(draft_token_ids, logits),
    )
    output = (
        *word_rows(output_token_ids, logits),
        *words(output_lens, logits),
        0 if output_token_ids is None else output_token_ids.shape[1],
    )
    if logit_bias_ids is not None:
        width = logit_bias_ids.shape[1]
        launch(
            _add_biases,
            num_blocks(batch * width, _ENTRIES),
            logits,
            *rows,
            *word_rows(logit_bias_ids, logits),
            *word_rows(logit_bias, logits),
            width,
            ENTRIES=_ENTRIES,
        )
    if repetition_penalty is not None:
        tables = min(batch, _MAX_TABLES)
        launch(
            _penalise,
            tables,
            logits,
            *rows,
            *words(repetition_penalty, logits),
            *words(frequency_penalty, logits),
            *words(presence_penalty, logits),
            *word_rows(prompt_token_ids, logits),
            *words(prompt_lens, logits),
            0 if prompt_token_ids is None else prompt_token_ids.shape[1],
            *output,
            tables,
            logits.new_zeros(tables, size, dtype=torch.int32),
            TOKENS=_TOKENS,
        )
    allowed = logits.new_empty(0, dtype=torch.int32)
    if allowed_token_ids is not None:
        allowed = logits.new_empty(batch, num_words, dtype=torch.int32)
        launch(
            _pack_allowed,
            batch,
            logits,
            size,
            num_words,
            *word_rows(allowed_token_ids, logits),
            allowed_token_ids.shape[1],
            allowed,
            TOKENS=_TOKENS,
        )
    if allowed_token_ids is not None or grammar_bitmask is not None:
        parts = num_blocks(size, _IDS)
        launch(
            _mask_rows,
            batch * parts,
            logits,
            *rows,
            parts,
            num_words,
            int(allowed_token_ids is not None),
            allowed,
            *word_rows(grammar_bitmask, logits),
            IDS=_IDS,
        )
    num_stops = 0 if stop_token_ids is None else stop_token_ids.shape[1]
    num_bad_words = 0 if bad_words is None else bad_words.shape[1] // bad_word_width
    launch(
        _mask_stops,
        num_blocks(batch * num_stops, _ENTRIES),
        logits,
        *rows,
        *word_rows(stop_token_ids, logits),
        num_stops,
        *words(min_tokens, logits),
        *words(output_lens, logits),
        ENTRIES=_ENTRIES,
    )
    launch(
        _mask_bad_words,
        num_blocks(batch * num_bad_words, _ENTRIES),
        logits,
        *rows,
        *word_rows(bad_words, logits),
        num_bad_words,
        bad_word_width,
        *output,
        ENTRIES=_ENTRIES,
    )


def _together(checks: Checks, **pair: Tensor | None) -> None:
    """Both of two arguments are given, or neither."""
    if len({value is None for value in pair.values()}) > 1:
        checks.fail(f"{' and '.join(pair)} must be given together, got one")


def _id_lists(checks: Checks, lists: Tensor | None, name: str, batch: int) -> None:
    """A list of each request."""
    if lists is None:
        return
    checks.integer(lists, name)
    if lists.dim() != 2 or lists.shape[0] != batch:
        checks.fail(f"{name} must be [batch, n] with {count_of(batch, 'row')}, got {shape_of(lists)}")


@triton.jit
def _length(ids_layout, lens, lens_layout, width, request, mask):
    """How many tokens a request's list has."""
    length = clamped(load_int(lens, lens_layout, request, mask & is_present(ids_layout)), 0, width)
    return tl.where(is_present(ids_layout), length, 0)


@kernel
def _add_biases(
    logits,
    logits_stride: tl.int64,
    batch: tl.int64,
    num_drafts: tl.int64,
    vocab_size: tl.int64,
    ends,
    ends_layout: tl.int64,
    drafts,
    drafts_layout: tl.int64,
    ids,
    ids_row_stride: tl.int64,
    ids_layout: tl.int64,
    biases,
    biases_row_stride: tl.int64,
    biases_layout: tl.int64,
    width: tl.int64,
    ENTRIES: tl.constexpr,
):
    task = tl.program_id(0).to(tl.int64) * ENTRIES + tl.arange(0, ENTRIES)
    request = task // width
    j = task - request * width
    mask = request < batch
    token = load_int_at(ids, ids_row_stride, ids_layout, request, j, mask)
    is_first = mask & (token >= 0) & (token < vocab_size)
    i = tl.full([], 0, tl.int64)
    while i < width:
        earlier = load_int_at(ids, ids_row_stride, ids_layout, request, i, is_first & (i < j))
        is_first = is_first & ((i >= j) | (earlier != token))
        i += 1
    bias = load_real(biases + request * biases_row_stride, biases_layout, j, is_first).to(tl.float32)
    begin, end = drafts_of(ends, ends_layout, request, mask & is_present(ends_layout), num_drafts)
    longest = tl.max(tl.where(mask, end - begin, 0), axis=0)
    slot = tl.full([], 0, tl.int64)
    while slot <= longest:
        here = is_first & (slot <= end - begin)
        at = logits + (begin + request + slot) * logits_stride + token
        value = tl.load(at, mask=here, other=0.0).to(tl.float32) + bias
        tl.store(at, rounded(value, logits.dtype.element_ty), mask=here)
        slot += 1


@triton.jit
def _penalise_ids(
    logits,
    logits_stride,
    request,
    begin,
    end,
    drafts,
    drafts_layout,
    repetition,
    frequency,
    presence,
    counts,
    token,
    mask,
):
    """Penalises ids in the rows of a request that follow them. Whoever comes first to an id takes it."""
    count = tl.atomic_or(counts + tl.where(mask, token, 0), _IS_DONE, mask=mask)
    mine = mask & ((count & _IS_DONE) == 0)
    is_seen = mine & (count != 0)
    count = count & _COUNT
    slot = tl.full([], 0, tl.int64)
    while slot <= end - begin:
        if slot > 0:
            is_draft = load_int(drafts, drafts_layout, begin + slot - 1, slot > 0) == token
            is_seen = is_seen | (mine & is_draft)
            count += is_draft.to(tl.int32)
        at = logits + (begin + request + slot) * logits_stride + token
        logit = tl.load(at, mask=is_seen, other=0.0).to(tl.float32)
        value = tl.where(logit > 0.0, tl.div_rn(logit, repetition + tl.zeros_like(logit)), logit * repetition)
        value = tl.where(count > 0, (value - frequency * count.to(tl.float32)) - presence, value)
        tl.store(at, rounded(value, logits.dtype.element_ty), mask=is_seen)
        slot += 1


@kernel
def _penalise(
    logits,
    logits_stride: tl.int64,
    batch: tl.int64,
    num_drafts: tl.int64,
    vocab_size: tl.int64,
    ends,
    ends_layout: tl.int64,
    drafts,
    drafts_layout: tl.int64,
    repetitions,
    repetitions_layout: tl.int64,
    frequencies,
    frequencies_layout: tl.int64,
    presences,
    presences_layout: tl.int64,
    prompt,
    prompt_row_stride: tl.int64,
    prompt_layout: tl.int64,
    prompt_lens,
    prompt_lens_layout: tl.int64,
    prompt_width: tl.int64,
    output,
    output_row_stride: tl.int64,
    output_layout: tl.int64,
    output_lens,
    output_lens_layout: tl.int64,
    output_width: tl.int64,
    tables: tl.int64,
    counts,
    TOKENS: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    counts += request * vocab_size
    lane = tl.arange(0, TOKENS).to(tl.int64)
    while request < batch:
        here = request >= 0
        repetition = load_real(repetitions, repetitions_layout, request, here).to(tl.float32)
        frequency = load_real(frequencies, frequencies_layout, request, here).to(tl.float32)
        presence = load_real(presences, presences_layout, request, here).to(tl.float32)
        is_neutral = (repetition == 1.0) & (frequency == 0.0) & (presence == 0.0)
        begin, end = drafts_of(ends, ends_layout, request, is_present(ends_layout), num_drafts)
        prompt_len = _length(prompt_layout, prompt_lens, prompt_lens_layout, prompt_width, request, here)
        output_len = _length(output_layout, output_lens, output_lens_layout, output_width, request, here)
        longest = tl.where(is_neutral, 0, tl.maximum(prompt_len, output_len))
        first = tl.full([], 0, tl.int64)
        while first < longest:
            i = first + lane
            token = load_int_at(prompt, prompt_row_stride, prompt_layout, request, i, i < prompt_len)
            mask = (i < prompt_len) & (token >= 0) & (token < vocab_size)
            tl.atomic_or(counts + tl.where(mask, token, 0), _IN_PROMPT, mask=mask)
            token = load_int_at(output, output_row_stride, output_layout, request, i, i < output_len)
            mask = (i < output_len) & (token >= 0) & (token < vocab_size)
            tl.atomic_add(counts + tl.where(mask, token, 0), 1, mask=mask)
            first += TOKENS
        tl.debug_barrier()
        first = tl.full([], 0, tl.int64)
        longest = tl.where(is_neutral, 0, tl.maximum(longest, end - begin))
        while first < longest:
            i = first + lane
            token = load_int_at(prompt, prompt_row_stride, prompt_layout, request, i, i < prompt_len)
            mask = (i < prompt_len) & (token >= 0) & (token < vocab_size)
            _penalise_ids(
                logits, logits_stride, request, begin, end, drafts, drafts_layout,
                repetition, frequency, presence, counts, token, mask,
            )  # fmt: skip
            token = load_int_at(output, output_row_stride, output_layout, request, i, i < output_len)
            mask = (i < output_len) & (token >= 0) & (token < vocab_size)
            _penalise_ids(
                logits, logits_stride, request, begin, end, drafts, drafts_layout,
                repetition, frequency, presence, counts, token, mask,
            )  # fmt: skip
            token = load_int(drafts, drafts_layout, begin + i, i < end - begin)
            mask = (i < end - begin) & (token >= 0) & (token < vocab_size)
            _penalise_ids(
                logits, logits_stride, request, begin, end, drafts, drafts_layout,
                repetition, frequency, presence, counts, token, mask,
            )  # fmt: skip
            first += TOKENS
        tl.debug_barrier()
        first = tl.full([], 0, tl.int64)
        zero = tl.zeros([TOKENS], tl.int32)
        while first < longest:
            i = first + lane
            token = load_int_at(prompt, prompt_row_stride, prompt_layout, request, i, i < prompt_len)
            tl.store(counts + token, zero, mask=(i < prompt_len) & (token >= 0) & (token < vocab_size))
            token = load_int_at(output, output_row_stride, output_layout, request, i, i < output_len)
            tl.store(counts + token, zero, mask=(i < output_len) & (token >= 0) & (token < vocab_size))
            token = load_int(drafts, drafts_layout, begin + i, i < end - begin)
            tl.store(counts + token, zero, mask=(i < end - begin) & (token >= 0) & (token < vocab_size))
            first += TOKENS
        tl.debug_barrier()
        request += tables


@kernel
def _pack_allowed(
    vocab_size: tl.int64,
    num_words: tl.int64,
    ids,
    ids_row_stride: tl.int64,
    ids_layout: tl.int64,
    width: tl.int64,
    allowed,
    TOKENS: tl.constexpr,
):
    """The ids that a request is held to, a bit each. One without ids is held to nothing: all bits are 1."""
    request = tl.program_id(0).to(tl.int64)
    allowed += request * num_words
    lane = tl.arange(0, TOKENS).to(tl.int64)
    most = tl.full([], 0, tl.int32)
    first = tl.full([], 0, tl.int64)
    while first < width:
        j = first + lane
        token = load_int_at(ids, ids_row_stride, ids_layout, request, j, j < width)
        is_id = (j < width) & (token >= 0) & (token < vocab_size)
        most = tl.maximum(most, tl.max(is_id.to(tl.int32), axis=0))
        first += TOKENS
    first = tl.full([], 0, tl.int64)
    while first < num_words:
        tl.store(
            allowed + first + lane, tl.zeros([TOKENS], tl.int32) + (most - 1), mask=first + lane < num_words
        )
        first += TOKENS
    tl.debug_barrier()
    first = tl.full([], 0, tl.int64)
    while first < width:
        j = first + lane
        token = load_int_at(ids, ids_row_stride, ids_layout, request, j, j < width)
        is_id = (j < width) & (token >= 0) & (token < vocab_size)
        token = tl.where(is_id, token, 0)
        bit = tl.full([TOKENS], 1, tl.int32) << (token % 32).to(tl.int32)
        tl.atomic_or(allowed + token // 32, bit, mask=is_id)
        first += TOKENS


@kernel
def _mask_rows(
    logits,
    logits_stride: tl.int64,
    batch: tl.int64,
    num_drafts: tl.int64,
    vocab_size: tl.int64,
    ends,
    ends_layout: tl.int64,
    drafts,
    drafts_layout: tl.int64,
    parts: tl.int64,
    num_words: tl.int64,
    has_allowed: tl.int64,
    allowed,
    grammar,
    grammar_row_stride: tl.int64,
    grammar_layout: tl.int64,
    IDS: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    request = program // parts
    token = (program - request * parts) * IDS + tl.arange(0, IDS)
    mask = token < vocab_size
    word = token // 32
    bit = (token - word * 32).to(tl.int32)
    held = tl.load(allowed + request * num_words + word, mask=mask & (has_allowed != 0), other=-1)
    begin, end = drafts_of(ends, ends_layout, request, is_present(ends_layout), num_drafts)
    row = begin + request
    while row <= end + request:
        has_grammar = mask & is_present(grammar_layout)
        bits = load_int_at(grammar, grammar_row_stride, grammar_layout, row, word, has_grammar).to(tl.int32)
        bits = tl.where(is_present(grammar_layout), bits, -1) & tl.where(has_allowed != 0, held, -1)
        masked = tl.full([IDS], float("-inf"), tl.float32).to(logits.dtype.element_ty)
        tl.store(logits + row * logits_stride + token, masked, mask=mask & (((bits >> bit) & 1) == 0))
        row += 1


@kernel
def _mask_stops(
    logits,
    logits_stride: tl.int64,
    batch: tl.int64,
    num_drafts: tl.int64,
    vocab_size: tl.int64,
    ends,
    ends_layout: tl.int64,
    drafts,
    drafts_layout: tl.int64,
    stops,
    stops_row_stride: tl.int64,
    stops_layout: tl.int64,
    width: tl.int64,
    min_tokens,
    min_tokens_layout: tl.int64,
    output_lens,
    output_lens_layout: tl.int64,
    ENTRIES: tl.constexpr,
):
    """Masks stop tokens in the rows whose token would come before a request's least number of tokens."""
    task = tl.program_id(0).to(tl.int64) * ENTRIES + tl.arange(0, ENTRIES)
    request = task // width
    mask = request < batch
    token = load_int_at(stops, stops_row_stride, stops_layout, request, task - request * width, mask)
    is_id = mask & (token >= 0) & (token < vocab_size)
    missing = load_int(min_tokens, min_tokens_layout, request, is_id)
    missing = missing - load_int(output_lens, output_lens_layout, request, is_id)
    begin, end = drafts_of(ends, ends_layout, request, mask & is_present(ends_layout), num_drafts)
    longest = tl.max(tl.where(is_id, tl.minimum(end - begin + 1, missing), 0), axis=0)
    masked = tl.full([ENTRIES], float("-inf"), tl.float32).to(logits.dtype.element_ty)
    slot = tl.full([], 0, tl.int64)
    while slot < longest:
        here = is_id & (slot <= end - begin) & (slot < missing)
        tl.store(logits + (begin + request + slot) * logits_stride + token, masked, mask=here)
        slot += 1


@kernel
def _mask_bad_words(
    logits,
    logits_stride: tl.int64,
    batch: tl.int64,
    num_drafts: tl.int64,
    vocab_size: tl.int64,
    ends,
    ends_layout: tl.int64,
    drafts,
    drafts_layout: tl.int64,
    words_,
    words_row_stride: tl.int64,
    words_layout: tl.int64,
    num_bad_words: tl.int64,
    word_width: tl.int64,
    output,
    output_row_stride: tl.int64,
    output_layout: tl.int64,
    output_lens,
    output_lens_layout: tl.int64,
    output_width: tl.int64,
    ENTRIES: tl.constexpr,
):
    """Masks the last token of a bad word in the rows where the tokens before it are the rest of the word."""
    task = tl.program_id(0).to(tl.int64) * ENTRIES + tl.arange(0, ENTRIES)
    request = task // num_bad_words
    mask = request < batch
    first = (task - request * num_bad_words) * word_width
    length = tl.zeros([ENTRIES], tl.int64)
    goes_on = mask
    i = tl.full([], 0, tl.int64)
    while i < word_width:
        token = load_int_at(words_, words_row_stride, words_layout, request, first + i, goes_on)
        goes_on = goes_on & (token >= 0)
        length += goes_on.to(tl.int64)
        i += 1
    mask = mask & (length > 0)
    last = load_int_at(words_, words_row_stride, words_layout, request, first + length - 1, mask)
    mask = mask & (last >= 0) & (last < vocab_size)
    begin, end = drafts_of(ends, ends_layout, request, mask & is_present(ends_layout), num_drafts)
    output_len = _length(output_layout, output_lens, output_lens_layout, output_width, request, mask)
    longest = tl.max(tl.where(mask, end - begin, -1), axis=0)
    longest_word = tl.max(tl.where(mask, length, 0), axis=0)
    masked = tl.full([ENTRIES], float("-inf"), tl.float32).to(logits.dtype.element_ty)
    slot = tl.full([], 0, tl.int64)
    while slot <= longest:
        matches = mask & (slot <= end - begin)
        distance = tl.full([], 1, tl.int64)
        while distance < longest_word:
            here = matches & (distance < length)
            at = first + length - 1 - distance
            expected = load_int_at(words_, words_row_stride, words_layout, request, at, here)
            # The token so far before the slot's is a draft, or one of the output.
            is_draft = here & (distance <= slot)
            draft = load_int(drafts, drafts_layout, begin + slot - distance, is_draft)
            index = output_len + slot - distance
            is_output = here & (distance > slot) & (index >= 0)
            token = load_int_at(output, output_row_stride, output_layout, request, index, is_output)
            token = tl.where(is_draft, draft, tl.where(is_output, token, -1))
            matches = matches & ((here == 0) | (token == expected))
            distance += 1
        tl.store(logits + (begin + request + slot) * logits_stride + last, masked, mask=matches)
        slot += 1
