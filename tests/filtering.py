"""Where filters cut a row, by the definition in docs/numerics.md, in numpy; and rows that were cut there."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from typing import Any, NamedTuple

import inputs
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Float32Array = npt.NDArray[np.float32]
Float64Array = npt.NDArray[np.float64]

BLOCK_SIZE = 4096
#: Of 2^f, from f^1 on.
COEFFICIENTS = tuple(
    np.float32(float.fromhex(c))
    for c in ("0x1.62e42ap-1", "0x1.ebf9bep-3", "0x1.c6b70ep-5", "0x1.3cea90p-7", "0x1.5bb98ap-10")
)
NAMES = ("top_k", "top_p", "min_p")


def fma32(a: Float32Array, b: Float32Array, c: Float32Array) -> Float32Array:
    """``a * b + c``, rounded once: in float64 to odd, then to float32."""
    product = a.astype(np.float64) * b.astype(np.float64)
    addend = np.broadcast_to(c, product.shape).astype(np.float64)
    total = product + addend
    back = total - product
    error = (product - (total - back)) + (addend - back)
    even = (total.view(np.int64) & 1) == 0
    odd = np.where(even & (error != 0), np.nextafter(total, np.where(error > 0, np.inf, -np.inf)), total)
    return odd.astype(np.float32)


def masses(x: Float32Array, scale: np.float32) -> npt.NDArray[np.int64]:
    """Of the ids of a block that are not all masked, in units of 2^-40 of what the largest weighs."""
    magic, one = np.float32(12582912.0 + 127.0), np.float32(1.0)
    with np.errstate(over="ignore"):
        distance = np.maximum(np.float32(-127.0) / scale, x - x.max())
    shifted = fma32(distance, scale, magic)
    fraction = fma32(distance, scale, magic - shifted)
    power = (shifted.view(np.uint32) << 23).view(np.float32)
    polynomial = np.full_like(fraction, COEFFICIENTS[4])
    for coefficient in (*COEFFICIENTS[3::-1], one):
        polynomial = fma32(polynomial, fraction, coefficient)
    return np.rint((polynomial * power).astype(np.float64) * 2.0**40).astype(np.int64)


class Weighed:
    """A row, of which masses from a logit on are asked for."""

    def __init__(self, x: Float32Array, scale: np.float32) -> None:
        self.blocks = [x[i : i + BLOCK_SIZE] for i in range(0, x.size, BLOCK_SIZE)]
        self.blocks = [block for block in self.blocks if block.max() > -np.inf]
        self.masses = [masses(block, scale) for block in self.blocks]
        distances = [(float(block.max()) - float(x.max())) * float(scale) for block in self.blocks]
        self.weights = [float(np.exp2(distance)) for distance in distances]

    def from_on(self, threshold: float) -> float:
        total = 0.0
        for block, of_ids, weight in zip(self.blocks, self.masses, self.weights, strict=True):
            mass = int(of_ids[block >= threshold].sum())
            total = float(Fraction(mass) * Fraction(weight) + Fraction(total))
        return total


class Filters(NamedTuple):
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    joint: bool = False


def scale_of(temperature: float) -> np.float32:
    scale = np.float32(float.fromhex("0x1.71547652b82fep+0") / float(np.float32(temperature)))
    return max(scale, np.float32(2.0**-100))


def threshold_of(row: Tensor, temperature: float, filters: Filters) -> float:
    """-inf where nothing is to be masked."""
    x = row.float().numpy() + np.float32(0.0)
    if not np.float32(temperature) >= np.float32(1e-5):
        return -math.inf
    if np.isnan(x).any() or np.isposinf(x).any() or np.isneginf(x).all():
        return -math.inf
    scale = scale_of(temperature)
    threshold = np.float32(-np.inf)
    top_p, min_p = float(np.float32(filters.top_p)), float(np.float32(filters.min_p))
    if min_p > 0:
        least = float(x.max()) + math.log2(min(min_p, 1.0)) / float(scale)
        with np.errstate(over="ignore"):
            nearest = np.float32(least)
        threshold = nearest if float(nearest) >= least else np.nextafter(nearest, np.float32(np.inf))
    if 0 < filters.top_k < x.size:
        threshold = max(threshold, np.sort(x)[-filters.top_k])
    if top_p < 1:
        row_of = Weighed(x, scale)
        wanted = top_p * row_of.from_on(-math.inf if filters.joint else float(threshold))
        values = np.unique(x[x > -np.inf])
        first, last = 0, values.size - 1
        # From the smallest on the mass is enough, unless other filters ask for more than there is.
        while first < last:
            middle = (first + last + 1) // 2
            if row_of.from_on(float(values[middle])) >= wanted:
                first = middle
            else:
                last = middle - 1
        threshold = max(threshold, values[first])
    return float(threshold + np.float32(0.0))


def masked(row: Tensor, threshold: float) -> Tensor:
    """A copy of a row that is cut at a threshold."""
    return torch.where(row.float() < threshold, torch.tensor(-math.inf, dtype=row.dtype), row)


def filters_at(arguments: inputs.Arguments, entry: int, prefix: str = "") -> Filters:
    given = {}
    for name in NAMES:
        value = arguments.get(prefix + name)
        if value is not None:
            given[name] = value[entry].item() if isinstance(value, Tensor) else value
    return Filters(**given, joint=arguments.get("filter_order") == "joint")


def unfiltered_chain(arguments: inputs.Arguments) -> inputs.Arguments:
    """A call of ``verify_chain`` without filters, on rows that are masked instead."""
    names = [prefix + name for prefix in ("", "draft_") for name in NAMES]
    left_out = (*names, "filter_order", "draft_thresholds")
    plain = {name: value for name, value in arguments.items() if name not in left_out}
    target = arguments["target_logits"].clone()
    size = arguments.get("vocab_size") or target.shape[1]
    cu = arguments["cu_num_draft_tokens"].tolist()
    indices = arguments.get("request_indices")
    entries = range(len(cu) - 1) if indices is None else indices.tolist()
    temperature = arguments["temperature"]
    draft_temperature = arguments.get("draft_temperature")
    draft = arguments.get("draft_logits")
    draft = None if draft is None else draft.clone()
    given = arguments.get("draft_thresholds")
    has_bonus_rows = arguments.get("bonus_token_ids") is None
    for r, (begin, end) in enumerate(itertools.pairwise(cu)):
        entry = entries[r]
        own = float(temperature[entry] if isinstance(temperature, Tensor) else temperature)
        first = begin + (r if has_bonus_rows else 0)
        for row in target[first : first + end - begin + has_bonus_rows, :size]:
            row.copy_(masked(row, threshold_of(row, own, filters_at(arguments, entry))))
        if draft is None:
            continue
        drafter = own
        if draft_temperature is not None:
            drafter = float(
                draft_temperature[entry] if isinstance(draft_temperature, Tensor) else draft_temperature
            )
        filters = filters_at(arguments, entry, "draft_")
        for slot in range(end - begin):
            place = begin + slot if draft.dim() == 2 else (entry, slot)
            row = draft[place][:size]
            cut = threshold_of(row, drafter, filters)
            if given is not None:
                cut = float(given[begin + slot] if given.dim() == 1 else given[entry, slot])
            row.copy_(masked(row, cut))
    plain["target_logits"] = target
    if draft is not None:
        plain["draft_logits"] = draft
    return plain


def unfiltered_drafts(arguments: inputs.Arguments) -> inputs.Arguments:
    """A call of ``sample_recovered`` without filters, on rows that are masked instead."""
    count = arguments["draft_token_ids"].shape[0]
    # As chains of one draft each, that have no bonus rows.
    chain = arguments | {"cu_num_draft_tokens": torch.arange(count + 1), "bonus_token_ids": True}
    plain = unfiltered_chain(chain)
    return {name: value for name, value in plain.items() if name in arguments}


def rows(choice: Any, count: int, vocab_size: int, dtype: torch.dtype) -> Tensor:
    """Random rows, many of them with ties."""
    draw = inputs.generator(choice.randrange(2**31))
    made = []
    for _ in range(count):
        row = choice.choice((0.05, 1.0, 3.0, 3.0, 12.0)) * torch.randn(vocab_size, generator=draw)
        kind = choice.randrange(8)
        if kind == 0:
            row = row.round()
        elif kind == 1:
            row = (2 * row).round() / 2
        elif kind == 2:
            row = torch.full((vocab_size,), choice.choice((0.0, -0.0, 1.5, -40.0)))
        elif kind == 3:
            row = row.sort(descending=choice.random() < 0.5).values
        elif kind == 4:
            row = torch.where(torch.rand(vocab_size, generator=draw) < 0.9, -math.inf, row)
        elif kind == 5:
            row = torch.where(torch.rand(vocab_size, generator=draw) < 0.5, -0.0, row.clamp(max=0.0))
        elif kind == 6:
            row[choice.randrange(vocab_size)] = choice.choice((30.0, 3e4))
        made.append(row)
    return torch.stack(made).to(dtype)


def add_filters(arguments: inputs.Arguments, choice: Any, prefix: str = "") -> None:
    """Filters of all kinds for the requests of a call, one filter or several."""
    n = arguments["temperature"].shape[0]
    vocab_size = arguments["target_logits" if "target_logits" in arguments else "logits"].shape[1]
    chosen = [name for name in NAMES if choice.random() < 0.55] or [choice.choice(NAMES)]
    for name in chosen:
        if name == "top_k":
            near = (vocab_size - 1, vocab_size, vocab_size + 1)
            values = [choice.choice((-1, 0, 1, 2, 5, 50, 50, 300, 700, *near)) for _ in range(n)]
            dtype = choice.choice((torch.int32, torch.int64))
        elif name == "top_p":
            values = [
                choice.choice((0.0, 1e-6, 0.1, 0.5, 0.9, 0.9, 0.99, 1.0, 2.0, math.nan)) for _ in range(n)
            ]
            dtype = torch.float32
        else:
            values = [choice.choice((0.0, 1e-40, 1e-8, 0.01, 0.1, 0.5, 1.0, 3.0, math.nan)) for _ in range(n)]
            dtype = torch.float32
        arguments[prefix + name] = torch.tensor(values, dtype=dtype)
    if "filter_order" not in arguments:
        arguments["filter_order"] = choice.choice(("sequential", "joint"))
