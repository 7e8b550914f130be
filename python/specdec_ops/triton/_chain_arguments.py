"""From tensors to the launches of the chain program: what the three ops have in common."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec_ops.triton import (
    _block_rule,
    _chain,
    _decisions,
    _exact_match,
    _filters,
    _fly,
    _gumbel,
    _lossy,
    _rows,
)
from specdec_ops.triton._checks import Checks, num_blocks, shape_of
from specdec_ops.triton._launch import launch_prepared
from specdec_ops.triton._row_blocks import ROW_DTYPES, is_aligned, places_of_blocks, row_blocks

_LARGEST_VOCAB_SIZE = 1 << 23
PLAIN: int = _chain.PLAIN.value
#: How the kernels are cut and launched: bench/bench_triton.py tries others.
READER = {"num_warps": 4, "maxnreg": 96}
JUDGE = {"ATTEMPTS": 32, "num_warps": 4}
#: Readers' programs: the most blocks of one, and how many there should be before one has several.
BLOCKS_AT_ONCE, PROGRAMS = 8, 1024


class ChainChecks(Checks):
    """The checks of one op of the chain program: "<op>: <argument> must be <expectation>, got <actual>"."""

    def __init__(self, op: str, first: Tensor) -> None:
        """``first``: the tensor on whose device the others must be."""
        super().__init__(op)
        self._device = first.device

    def require(self, condition: bool, message: str) -> None:
        if not condition:
            self.fail(message)

    def dtype(self, tensor: Tensor, name: str, allowed: tuple[torch.dtype, ...], expected: str) -> None:
        if tensor.device != self._device:
            self.fail(
                f"{name} must be on the device of the other tensors, {self._device}, got {tensor.device}"
            )
        super().dtype(tensor, name, allowed, expected)

    def vocab_size(self, given: int | None, logits: Tensor, name: str) -> int:
        size = super().vocab_size(given, logits, name)
        self.require(
            size <= _LARGEST_VOCAB_SIZE, f"vocab_size must be at most {_LARGEST_VOCAB_SIZE}, got {size}"
        )
        return size


class View(NamedTuple):
    """A vector as kernels see it: its address, 0 where it is absent, and its stride in bytes."""

    address: int = 0
    stride: int = 0


class DraftView(NamedTuple):
    """What each draft has one of: draft after draft, or slot after slot in the entry of its request."""

    address: int = 0
    draft_stride: int = 0
    entry_stride: int = 0
    slot_stride: int = 0


_NONE, _NO_DRAFTS = View(), DraftView()


def view(tensor: Tensor) -> View:
    return View(tensor.data_ptr(), tensor.stride(0) * tensor.element_size())


def _draft_view(tensor: Tensor, in_entries: bool, item_size: int) -> DraftView:
    of_slot = tensor.stride(1 if in_entries else 0) * item_size
    if in_entries:
        return DraftView(tensor.data_ptr(), 0, tensor.stride(0) * item_size, of_slot)
    return DraftView(tensor.data_ptr(), of_slot, 0, of_slot)


class Entries(NamedTuple):
    """How temperatures, seeds and the like are laid out."""

    #: As messages put it.
    shape: str
    size: int
    num_drafts: int
    #: The most drafts of a request, of ops where draft laws may lie in entries; else -1.
    num_slots: int = -1


@dataclass
class Chain:
    """The arguments of one call."""

    checks: ChainChecks
    batch: int
    num_drafts: int
    target: Tensor
    vocab_size: int
    num_entries: int
    most_drafts: int
    width: int = 1
    #: Slots that a program judges at once.
    wave: int = 1
    has_bonus_rows: bool = True
    rule: int = 0
    #: Which kernel judges.
    variant: int = 0
    #: Float64 as bits.
    rule_parameters: tuple[int, int] = (0, 0)
    #: Drafts of a window of FLy, and how many probabilities its entropies are of.
    window: int = 0
    entropy_top_k: int = 1
    wide: int = 0
    law: int = 0
    numbers: int = 0
    draft_dtype: torch.dtype | None = None
    draft_is_aligned: bool = True
    support_size: int = 0
    final_stream: int = 3
    final_slot: int = 0
    views: dict[str, View] = field(default_factory=dict)
    draft_views: dict[str, DraftView] = field(default_factory=dict)
    element_strides: tuple[int, int] = (0, 0)
    filters: _filters.Filters | None = None

    def add(self, name: str, tensor: Tensor, wide: int = 0) -> None:
        self.views[name] = view(tensor)
        if wide and tensor.element_size() == 8:
            self.wide |= wide

    def set_request_indices(
        self, indices: Tensor | None, temperature: Tensor, by_request: str, num_slots: int = -1
    ) -> Entries:
        checks = self.checks
        if indices is None:
            return Entries(by_request, self.batch, self.num_drafts, num_slots)
        checks.integer(indices, "request_indices")
        checks.vector(indices, "request_indices", by_request, self.batch)
        checks.require(
            temperature.dim() == 1 and (temperature.shape[0] > 0 or self.batch == 0),
            "temperature must be [max_requests] with at least one element, got " + shape_of(temperature),
        )
        self.add("indices", indices, _rows.WIDE_INDICES.value)
        self.num_entries = temperature.shape[0]
        return Entries("[max_requests]", self.num_entries, self.num_drafts, num_slots)

    def set_temperature(self, temperature: Tensor, entries: Entries) -> None:
        self.checks.dtype(temperature, "temperature", (torch.float32,), "float32")
        self.checks.vector(temperature, "temperature", entries.shape, entries.size)
        self.add("temperature", temperature)

    def _lies_in_entries(self, tensor: Tensor, name: str, dims: int, shape: str, entries: Entries) -> bool:
        if entries.num_slots < 0 or tensor.dim() != dims + 2:
            return False
        self.checks.require(
            tensor.shape[0] == entries.size and tensor.shape[1] >= entries.num_slots,
            f"{name} must be {shape} with max_requests = {entries.size} and k at least "
            f"max_num_draft_tokens = {entries.num_slots}, got {shape_of(tensor)}",
        )
        return True

    def draft_numbers(self, tensor: Tensor, name: str, entries: Entries) -> DraftView:
        """A number for each draft."""
        in_entries = self._lies_in_entries(tensor, name, 0, "[max_requests, k]", entries)
        if not in_entries:
            self.checks.vector(tensor, name, "[num_drafts]", entries.num_drafts)
        return _draft_view(tensor, in_entries, tensor.element_size())

    def set_filters(self, arguments: _filters.FilterArguments, entries: Entries) -> None:
        self.filters = _filters.filters_of(self, arguments, entries)

    def set_draft_law(
        self,
        logits: Tensor | None,
        probs: Tensor | None,
        logsumexp: Tensor | None,
        support_ids: Tensor | None,
        support_logprobs: Tensor | None,
        temperature: Tensor | None,
        has_law: Tensor | None,
        entries: Entries,
    ) -> None:
        checks, num_drafts = self.checks, entries.num_drafts
        checks.require(
            sum(law is not None for law in (logits, probs, support_ids)) <= 1,
            "draft_logits, draft_probs and draft_support_ids must be at most one, got several",
        )
        checks.require(
            logsumexp is None or logits is not None,
            "draft_logsumexp must be given with draft_logits, got it alone",
        )
        checks.require(
            (support_ids is None) == (support_logprobs is None),
            "draft_support_ids and draft_support_logprobs must be given together, got one",
        )
        rows, name = (logits, "draft_logits") if logits is not None else (probs, "draft_probs")
        if rows is not None:
            in_entries = self._lies_in_entries(rows, name, 1, "[max_requests, k, width]", entries)
            if in_entries:
                checks.row_dtype(rows, name)
                checks.contiguous_rows(rows, name)
            else:
                checks.rows(rows, name, "[num_drafts, width]", num_drafts)
            width = rows.shape[-1]
            checks.require(
                width >= self.vocab_size or num_drafts == 0,
                f"{name} must have at least vocab_size = {self.vocab_size} columns, got {width}",
            )
            self.law = (_rows.LOGITS if logits is not None else _rows.PROBS).value
            self.draft_dtype = rows.dtype
            self.draft_views["draft"] = of_rows = _draft_view(rows, in_entries, 1)
            strides = of_rows.draft_stride | of_rows.entry_stride | of_rows.slot_stride
            self.draft_is_aligned = (of_rows.address | strides * rows.element_size()) % 16 == 0
        if logsumexp is not None:
            checks.real(logsumexp, "draft_logsumexp")
            self.draft_views["lse"] = self.draft_numbers(logsumexp, "draft_logsumexp", entries)
            if logsumexp.dtype == torch.float64:
                self.wide |= _rows.WIDE_LOGSUMEXP.value
        if support_ids is not None and support_logprobs is not None:
            checks.integer(support_ids, "draft_support_ids")
            checks.dtype(support_logprobs, "draft_support_logprobs", (torch.float32,), "float32")
            in_entries = self._lies_in_entries(
                support_ids, "draft_support_ids", 1, "[max_requests, k, support]", entries
            )
            if not in_entries and (support_ids.dim() != 2 or support_ids.shape[0] != num_drafts):
                checks.fail(
                    f"draft_support_ids must be [num_drafts, support] with {num_drafts} rows, got "
                    + shape_of(support_ids)
                )
            checks.require(
                support_logprobs.shape == support_ids.shape,
                f"draft_support_logprobs must have the shape of draft_support_ids, {shape_of(support_ids)}, "
                f"got {shape_of(support_logprobs)}",
            )
            self.law = _rows.SUPPORT.value
            self.draft_views["support_ids"] = _draft_view(support_ids, in_entries, support_ids.element_size())
            self.draft_views["support_logprobs"] = _draft_view(support_logprobs, in_entries, 4)
            self.element_strides = (
                support_ids.stride(-1) * support_ids.element_size(),
                support_logprobs.stride(-1) * 4,
            )
            self.support_size = support_ids.shape[-1]
            if support_ids.dtype == torch.int64:
                self.wide |= _rows.WIDE_SUPPORT_IDS.value
        if temperature is not None:
            checks.dtype(temperature, "draft_temperature", (torch.float32,), "float32")
            checks.vector(temperature, "draft_temperature", entries.shape, entries.size)
            self.add("draft_temperature", temperature)
        if has_law is not None:
            checks.dtype(has_law, "has_draft_law", (torch.bool,), "bool")
            checks.vector(has_law, "has_draft_law", entries.shape, entries.size)
            self.add("has_draft_law", has_law)

    def leave_out_draft_law(self) -> None:
        self.law = _rows.ONE_HOT.value
        self.draft_dtype, self.draft_is_aligned = None, True
        self.draft_views.clear()
        if self.filters is not None:
            self.filters = self.filters.without_drafts()

    def set_seeds(
        self, seeds: Tensor | None, positions: Tensor | None, by_request: str, entries: Entries
    ) -> None:
        checks = self.checks
        checks.require(
            (seeds is None) == (positions is None), "seeds and positions must be given together, got one"
        )
        if seeds is None or positions is None:
            return
        checks.dtype(seeds, "seeds", (torch.int64,), "int64")
        checks.vector(seeds, "seeds", entries.shape, entries.size)
        checks.integer(positions, "positions")
        checks.vector(positions, "positions", by_request, self.batch)
        self.add("seeds", seeds)
        self.add("positions", positions, _rows.WIDE_POSITIONS.value)
        self.numbers = _chain.SEEDS.value

    def set_uniforms(self, uniforms: Tensor, name: str, shape: str, size: int, key: str, wide: int) -> None:
        self.checks.real(uniforms, name)
        self.checks.vector(uniforms, name, shape, size)
        self.add(key, uniforms, wide)
        self.numbers = _chain.UNIFORMS.value

    def run(
        self,
        token_ids: Tensor,
        status: Tensor,
        num_accepted: Tensor | None = None,
        logsumexp: Tensor | None = None,
        logprobs: Tensor | None = None,
        accept_probs: Tensor | None = None,
    ) -> None:
        """Launches the readers and the judges on the current stream."""
        if self.batch == 0:
            return
        target = self.target
        num_target_rows = self.num_drafts + (self.batch if self.has_bonus_rows else 0)
        blocks = row_blocks(self.vocab_size)
        reads_drafts = self.law == _rows.LOGITS.value and "lse" not in self.draft_views
        num_rows = num_target_rows + (self.num_drafts if reads_drafts else 0)
        plane = num_rows * blocks
        num_sums = num_target_rows * blocks * _rows.CHUNKS_PER_BLOCK.value
        stats = target.new_empty(max(3 * plane + num_sums, 1), dtype=torch.float32)

        dtype = ROW_DTYPES[target.dtype]
        draft_dtype = dtype if self.draft_dtype is None else ROW_DTYPES[self.draft_dtype]
        aligned = self.draft_is_aligned and is_aligned(target)
        variant = self.variant if self.variant == PLAIN else self._variant()
        wants_law = logsumexp is not None or logprobs is not None
        # Greedy requests are judged by their laws too.
        needs_law = wants_law or variant == _chain.FLY.value or self.rule == _lossy.TOP_N.value
        # Sums by the hardware's exponential, unless something shows their last bits.
        is_exact = (
            wants_law
            or accept_probs is not None
            or self.rule != _chain.TOKEN_LEVEL.value
            or variant != PLAIN
            or self.numbers == _chain.UNIFORMS.value
            or self.law not in (_rows.ONE_HOT.value, _rows.LOGITS.value)
        )
        request, shape, rows = self._requests()
        own = (self.vocab_size, blocks, num_target_rows)
        num_places = places_of_blocks(blocks)
        filters = self.filters
        thresholds: tuple[int, ...] = (0, 0, 0, 0, 0)
        if filters is not None:
            law = (int(reads_drafts), int(needs_law), int(is_exact), stats.data_ptr(), plane)
            slots = self.most_drafts + int(self.has_bonus_rows)
            filters.read_rows(
                target, (*request, self.wide, self.batch, *shape), rows, own, law,
                (dtype, draft_dtype, self.law, aligned), self.batch * slots,
            )  # fmt: skip
            thresholds = (filters.thresholds, *filters.draft_thresholds)
        elif num_target_rows > 0:
            blocks_at_once = min(BLOCKS_AT_ONCE, max(1, num_rows * blocks // PROGRAMS))
            launch_prepared(
                _rows.read_rows, num_rows * num_blocks(blocks, blocks_at_once), target,
                (*request, self.wide, self.batch, *shape, *rows, *own, int(needs_law), blocks_at_once,
                 stats.data_ptr(), plane),
                (dtype, draft_dtype if reads_drafts else dtype, self.law, reads_drafts, aligned, is_exact),
                READER,
            )  # fmt: skip
        views, of_drafts = self.views, self.draft_views
        support_ids = of_drafts.get("support_ids", _NO_DRAFTS)
        support_logprobs = of_drafts.get("support_logprobs", _NO_DRAFTS)
        common = (*request, self.wide, *shape, *rows, *own, stats.data_ptr(), plane)
        chain = (
            *views.get("draft_ids", _NONE), *of_drafts.get("lse", _NO_DRAFTS),
            *support_ids, self.element_strides[0], *support_logprobs, self.element_strides[1],
            self.support_size, *views.get("seeds", _NONE), *views.get("positions", _NONE),
            *views.get("accept_uniforms", _NONE), *views.get("final_uniforms", _NONE),
        )  # fmt: skip
        constants = (
            dtype,
            draft_dtype,
            self.law,
            self.numbers,
            aligned,
            num_places,
            self.wave,
            filters is not None,
        )
        probs = 0 if accept_probs is None else accept_probs.data_ptr()
        answers = None
        if variant != PLAIN:
            answers = self._ask(variant, common, chain, constants, thresholds, probs)
        launch_prepared(
            _chain.judge_requests, self.batch, target,
            (*common, *chain,
             *views.get("bonus_ids", _NONE), *views.get("rates", _NONE), self.rule,
             self.final_stream, self.final_slot, *views.get("final_slots", _NONE),
             token_ids.data_ptr(), int(token_ids.dtype == torch.int64), self.width,
             *(0 if out is None else out.data_ptr()
               for out in (num_accepted, status, logsumexp, logprobs)), probs, *thresholds,
             *self.rule_parameters, *views.get("rule_mask", _NONE), self.window,
             0 if answers is None else answers.data_ptr()),
            (*constants, variant), JUDGE,
        )  # fmt: skip

    def find_thresholds(self, thresholds: Tensor) -> None:
        """Launches what finds where filters cut the rows of ``sample``, for readers of their own."""
        filters = self.filters
        if filters is None:
            return
        target = self.target
        filters.thresholds = thresholds.data_ptr()
        blocks = row_blocks(self.vocab_size)
        request, shape, rows = self._requests()
        dtype = ROW_DTYPES[target.dtype]
        filters.find_thresholds(
            target, (*request, self.wide, self.batch, *shape), rows,
            (self.vocab_size, blocks, self.batch), self.batch * blocks,
            (dtype, dtype, self.law, is_aligned(target)), self.batch,
        )  # fmt: skip

    def _requests(self) -> tuple[list[int], tuple[int, ...], tuple[int, ...]]:
        """Arguments that all kernels have: of requests, of their shape, and of rows."""
        target = self.target
        names = ("cu", "indices", "temperature", "draft_temperature", "has_draft_law")
        request = [number for name in names for number in self.views.get(name, _NONE)]
        has_numbers = int(self.numbers != _chain.NO_NUMBERS.value)
        shape = (self.num_drafts, self.most_drafts, self.num_entries, int(self.has_bonus_rows), has_numbers)
        draft = self.draft_views.get("draft", _NO_DRAFTS)
        return request, shape, (target.data_ptr(), target.stride(0), *draft)

    def _variant(self) -> int:
        """Which kernel judges: without random numbers every request is greedy."""
        needs_numbers = (_chain.EXACT_MATCH.value, _chain.GUMBEL_NOISE.value, _chain.BLOCK.value)
        if self.variant in needs_numbers and self.numbers == _chain.NO_NUMBERS.value:
            return PLAIN
        return self.variant

    def _ask(
        self,
        variant: int,
        common: tuple[int, ...],
        chain: tuple[int, ...],
        constants: tuple[Any, ...],
        thresholds: tuple[int, ...],
        accept_probs: int,
    ) -> Tensor | None:
        """Launches what tells the judges of the rows, and returns where it does."""
        target, views = self.target, self.views
        dtype, _, _, _, aligned, num_places, *_ = constants
        if variant == _chain.BLOCK.value:
            num_bytes = _decisions.size_in_bytes(self.num_drafts, self.batch)
            answers = target.new_empty(num_bytes, dtype=torch.uint8)
            launch_prepared(
                _block_rule.walk_chains, self.batch, target,
                (*common, *chain, *thresholds, accept_probs, answers.data_ptr()), constants, _block_rule.WALK,
            )  # fmt: skip
            return answers
        num_rows = self.num_drafts + (self.batch if self.has_bonus_rows else 0)
        num_slots = self.most_drafts + int(self.has_bonus_rows)
        if variant == _chain.EXACT_MATCH.value:
            answers = target.new_empty(max(num_rows, 1), dtype=torch.int32)
            names = ("seeds", "positions", "accept_uniforms", "final_uniforms")
            launch_prepared(
                _exact_match.draw_tokens, self.batch * num_slots, target,
                (*common, *(number for name in names for number in views.get(name, _NONE)), self.batch,
                 thresholds[0], answers.data_ptr()),
                (dtype, self.numbers, aligned, num_places), _exact_match.DRAW,
            )  # fmt: skip
            return answers
        if variant == _chain.GUMBEL_NOISE.value:
            blocks = row_blocks(self.vocab_size)
            answers = target.new_empty(max(2 * num_rows * blocks, 1), dtype=torch.float32)
            launch_prepared(
                _gumbel.score_blocks, self.batch * num_slots * blocks, target,
                (*common, *views.get("seeds", _NONE), *views.get("positions", _NONE), self.final_stream,
                 self.final_slot, *views.get("final_slots", _NONE), self.batch, thresholds[0],
                 answers.data_ptr()),
                (dtype, num_places), _gumbel.SCORE,
            )  # fmt: skip
            return answers
        if self.rule in (_lossy.TYPICAL.value, _lossy.TOP_N.value, _lossy.MARGIN.value):
            blocks = row_blocks(self.vocab_size)
            answers = target.new_empty(max(num_rows * blocks, 1), dtype=torch.float32)
            launch_prepared(
                _lossy.ask_blocks, self.batch * self.most_drafts * blocks, target,
                (*common, *views.get("draft_ids", _NONE), self.rule, self.rule_parameters[0],
                 *views.get("rule_mask", _NONE), self.batch, thresholds[0], answers.data_ptr()),
                (dtype, num_places), _lossy.ASK,
            )  # fmt: skip
            return answers
        if variant == _chain.FLY.value:
            answers = target.new_empty(max(self.num_drafts + self.batch, 1), dtype=torch.float64)
            launch_prepared(
                _fly.find_entropies, self.batch * max(self.most_drafts - self.window, 0), target,
                (*common, self.batch, self.window, self.entropy_top_k, thresholds[0], answers.data_ptr()),
                (dtype, num_places), _fly.GATE,
            )  # fmt: skip
            return answers
        return None
