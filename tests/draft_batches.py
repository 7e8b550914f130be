"""Random ragged batches of drafts, and tensors in buffers that notice what happens around them."""

from __future__ import annotations

import random
from collections.abc import Collection
from typing import Any

import torch
from implementations import REFERENCE, Implementation
from torch import Tensor

#: An id or a probability that would show in any result that it got into.
GUARD = 77
POISON = -99


class Batch:
    """The shape of a random batch; its methods make tensors of random dtype and length."""

    max_size = 6

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.counts = [rng.randint(0, 4) for _ in range(rng.randint(0, self.max_size))]
        self.size = len(self.counts)
        #: Drafts that belong to no request may follow.
        self.num_drafts = sum(self.counts) + rng.choice([0, 0, 2])
        self.k = max(self.counts, default=0) + rng.choice([0, 0, 1])
        self.generator = torch.Generator().manual_seed(rng.getrandbits(32))

    def longer(self, size: int) -> int:
        return size + self.rng.choice([0, 0, 3])

    def cu_num_draft_tokens(self) -> Tensor:
        """Either form, either dtype."""
        totals = torch.tensor([0, *self.counts]).cumsum(0)
        return totals[self.rng.randint(0, 1) :].to(self.rng.choice([torch.int32, torch.int64]))

    def ints(self, low: int, high: int, *shape: int) -> Tensor:
        """From ``low`` to ``high``, both included."""
        values = torch.randint(low, high + 1, shape, generator=self.generator)
        return values.to(self.rng.choice([torch.int32, torch.int64]))

    def bools(self, size: int) -> Tensor:
        return torch.rand(size, generator=self.generator) < 0.5

    def reals(self, *shape: int, dtypes: Collection[torch.dtype] = (torch.float32, torch.float64)) -> Tensor:
        """From 0 on and below 1; some of them are 0."""
        values = torch.rand(shape, generator=self.generator, dtype=torch.float64)
        values[values < 0.1] = 0.0
        return values.to(self.rng.choice(list(dtypes)))

    def maybe(self, value: Tensor) -> Tensor | None:
        return value if self.rng.random() < 0.5 else None


def guarded(values: Tensor, rng: random.Random, *, contiguous_rows: bool) -> tuple[Tensor, Tensor]:
    """A buffer full of guard values, and a slice of it with these values."""
    slices = []
    for dim, size in enumerate(values.shape):
        step = 1 if contiguous_rows and dim == values.dim() - 1 else rng.randint(1, 2)
        slices.append(slice(2, 2 + size * step, step))
    buffer = values.new_full([s.stop + 2 for s in slices], GUARD)
    view = buffer[tuple(slices)]
    view.copy_(values)
    return buffer, view


def check_against_reference(
    native: Implementation,
    name: str,
    arguments: dict[str, Any],
    written: Collection[str],
    rng: random.Random,
    *,
    contiguous_rows: bool = False,
) -> None:
    """The op does to slices what the reference does to plain tensors, and nothing else."""
    slices: dict[str, Any] = dict(arguments)
    plain: dict[str, Any] = dict(arguments)
    buffers: dict[str, Tensor] = {}
    for key, value in arguments.items():
        if isinstance(value, Tensor):
            buffers[key], slices[key] = guarded(value, rng, contiguous_rows=contiguous_rows)
            plain[key] = value.clone()
    before = {key: buffer.clone() for key, buffer in buffers.items()}
    getattr(native, name)(**slices)
    getattr(REFERENCE, name)(**plain)
    for key, buffer in buffers.items():
        if key in written:
            assert torch.equal(slices[key], plain[key]), key
            slices[key].copy_(arguments[key])
        assert torch.equal(buffer, before[key]), f"{key} was written where it must not be"


def check_op(op: Any, arguments: dict[str, Any]) -> None:
    """torch.library's checks, with the arguments in the order of the schema."""
    torch.library.opcheck(op, tuple(arguments.get(argument.name) for argument in op._schema.arguments))
