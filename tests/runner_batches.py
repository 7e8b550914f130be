"""Batches of a model runner: random ones, and tensors in buffers that notice what happens around them."""

from __future__ import annotations

import random
import re
from collections.abc import Collection, Iterable
from typing import Any

import pytest
import torch
from implementations import REFERENCE, Implementation
from torch import Tensor

GUARD = -77
POISON = -99


class Guards:
    """Places tensors as slices of wider buffers, any strides, and notices writes beside them."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._placed: list[tuple[Tensor, Tensor]] = []

    def place(self, values: Tensor, *, writable: bool) -> Tensor:
        """A slice with these values; inputs with equal values may be expanded from one."""
        if not writable and values.numel() > 1 and len(values.unique()) == 1 and self._rng.random() < 0.5:
            return values.reshape(-1)[:1].clone().reshape([1] * values.dim()).expand(values.shape)
        slices = []
        for size in values.shape:
            step = self._rng.randint(1, 2)
            slices.append(slice(2, 2 + size * step, step))
        buffer = values.new_full([s.stop + 2 for s in slices], GUARD)
        beside = torch.ones(buffer.shape, dtype=torch.bool)
        beside[tuple(slices)] = False
        self._placed.append((buffer, beside))
        view = buffer[tuple(slices)]
        view.copy_(values)
        return view

    def assert_intact(self) -> None:
        for buffer, beside in self._placed:
            assert (buffer[beside] == GUARD).all()


def check_against_reference(
    native: Implementation,
    name: str,
    arguments: dict[str, Any],
    written: Collection[str],
    rng: random.Random,
) -> None:
    """The op does to slices what the reference does to plain tensors, and nothing else."""
    guards = Guards(rng)
    sliced = {
        key: guards.place(value, writable=key in written) if isinstance(value, Tensor) else value
        for key, value in arguments.items()
    }
    plain = {key: value.clone() if isinstance(value, Tensor) else value for key, value in arguments.items()}
    getattr(native, name)(**sliced)
    getattr(REFERENCE, name)(**plain)
    for key, want in plain.items():
        if isinstance(want, Tensor):
            assert torch.equal(sliced[key], want), key
            assert key in written or torch.equal(want, arguments[key]), f"{key} was written"
    guards.assert_intact()


class Batch:
    """The shape of a random batch; its methods make tensors of random dtype."""

    max_size = 6
    max_query_len = 7

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.max_requests = rng.randint(1, self.max_size - 1)
        self.size = rng.randint(0, self.max_size)
        self.max_num_drafts = rng.randint(0, 4)
        rows = rng.sample(range(self.max_requests), self.max_requests)
        padding = [-1, -1, -3, self.max_requests, 2**31 - 1]
        self.request_indices = [
            rng.choice(padding) if rng.random() < 0.2 or not rows else rows.pop() for _ in range(self.size)
        ]
        self.query_lens = [rng.randint(0, self.max_query_len) for _ in range(self.size)]
        # More logits rows than drafts and the token before them happen too.
        self.num_logits = [min(rng.randint(0, self.max_num_drafts + 2), n) for n in self.query_lens]

    def ints(self, values: Iterable[int]) -> Tensor:
        return torch.tensor(list(values), dtype=self.rng.choice([torch.int32, torch.int64]))

    def random_ints(self, low: int, high: int, *shape: int) -> Tensor:
        values = torch.zeros(shape, dtype=self.rng.choice([torch.int32, torch.int64]))
        for place in values.view(-1).split(1):
            place.fill_(self.rng.randint(low, high))
        return values

    def totals(self, counts: list[int]) -> Tensor:
        """Running totals, which now and then go on after the batch."""
        values = [0]
        for count in counts:
            values.append(values[-1] + count)
        return self.ints(values + [values[-1]] * self.rng.choice([0, 0, 2]))

    def poisoned(self, size: int) -> Tensor:
        """An output of at least that size."""
        return self.ints([POISON] * (size + self.rng.choice([0, 0, 2])))


def assert_raises(
    implementation: Implementation,
    name: str,
    arguments: dict[str, Any],
    written: Collection[str],
    message: str,
) -> None:
    """The error names op and argument, and nothing was written before it."""
    before = {key: arguments[key].clone() for key in written if isinstance(arguments.get(key), Tensor)}
    with pytest.raises(RuntimeError, match=f"^{re.escape(f'{name}: {message}')}"):
        getattr(implementation, name)(**arguments)
    for key, value in before.items():
        assert torch.equal(arguments[key], value), key


def check_op(op: Any, arguments: dict[str, Any]) -> None:
    """torch.library's checks, with the arguments in the order of the schema."""
    torch.library.opcheck(op, tuple(arguments.get(argument.name) for argument in op._schema.arguments))
