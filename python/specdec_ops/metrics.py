"""Metrics of speculative decoding: acceptance length, acceptance rate, rates by position."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

#: One number for each request, on a device or on the host.
Counts = Tensor | npt.NDArray[np.integer] | Sequence[int]
#: One flag for each request.
Flags = Tensor | npt.NDArray[np.bool_] | Sequence[bool]


class AcceptanceSnapshot(NamedTuple):
    """Counters and rates of :class:`AcceptanceMetrics`; rates are NaN where nothing was drafted.

    Example:
        >>> import specdec_ops
        >>> metrics = specdec_ops.AcceptanceMetrics(num_speculative_tokens=2)
        >>> metrics.observe([1], [2])
        >>> print(metrics.snapshot())
        acceptance length 2.00, acceptance rate 50.0% (1 of 2), by position 1.000 0.000, 1 draft
    """

    #: Drafts: requests, over all steps, that had draft tokens to verify.
    num_drafts: int
    #: Tokens of those drafts.
    num_draft_tokens: int
    #: Those of them that were accepted; recovered and bonus tokens are not among them.
    num_accepted_tokens: int
    #: ``num_speculative_tokens`` numbers: drafts that were accepted at this position.
    num_accepted_tokens_per_pos: tuple[int, ...]
    #: ``num_speculative_tokens`` numbers: drafts that had a token at this position.
    num_draft_tokens_per_pos: tuple[int, ...]
    #: Tokens emitted by a verified draft on average, the recovered or bonus token included:
    #: ``1 + num_accepted_tokens / num_drafts``.
    acceptance_length: float
    #: ``num_accepted_tokens / num_draft_tokens``.
    acceptance_rate: float
    #: ``num_accepted_tokens_per_pos / num_drafts``. Drafts that were shorter count as not accepted;
    #: divide by ``num_draft_tokens_per_pos`` to leave them out.
    acceptance_rate_per_pos: tuple[float, ...]

    def __str__(self) -> str:
        """One line for a log."""
        rates = " ".join(f"{rate:.3f}" for rate in self.acceptance_rate_per_pos)
        return (
            f"acceptance length {self.acceptance_length:.2f}, acceptance rate {self.acceptance_rate:.1%} "
            f"({self.num_accepted_tokens} of {self.num_draft_tokens}), by position {rates}, "
            f"{self.num_drafts} {'draft' if self.num_drafts == 1 else 'drafts'}"
        )


class AcceptanceMetrics:
    """Accumulates how many draft tokens were accepted, over steps and requests.

    The definitions are those of vLLM's ``vllm:spec_decode_*`` counters, whose names the counters here
    have too. A request without draft tokens in a step is no draft and counts nowhere.

    What is counted is what was verified. Tokens that the engine cuts off afterwards (behind an
    end-of-sequence token, above the limit of length) are counted as accepted here, as in vLLM.

    On the host, ``observe`` is a loop over the requests; with tensors of another device it is a few small
    kernels there, and nothing waits for them until ``snapshot``. An engine that copies the counts to the
    host anyway had better observe them there. One object is for one thread.

    Args:
        num_speculative_tokens: The most draft tokens that a request can have in a step.

    Raises:
        RuntimeError: ``num_speculative_tokens`` is not positive.

    Source: mean acceptance length: tau of Leviathan et al., arXiv 2211.17192.

    Example:
        >>> import torch, specdec_ops
        >>> metrics = specdec_ops.AcceptanceMetrics(num_speculative_tokens=3)
        >>> num_accepted = torch.tensor([3, 1, 0])  # of verify_chain
        >>> metrics.observe(num_accepted, cu_num_draft_tokens=torch.tensor([0, 3, 5, 5]))
        >>> snapshot = metrics.snapshot()
        >>> snapshot.num_drafts, snapshot.acceptance_length, snapshot.acceptance_rate
        (2, 3.0, 0.8)
        >>> snapshot.acceptance_rate_per_pos
        (1.0, 0.5, 0.5)
    """

    def __init__(self, num_speculative_tokens: int) -> None:
        """Starts with nothing counted."""
        if not isinstance(num_speculative_tokens, int) or num_speculative_tokens < 1:
            raise RuntimeError(
                "AcceptanceMetrics: num_speculative_tokens must be a positive integer, "
                f"got {num_speculative_tokens!r}"
            )
        self._most = num_speculative_tokens
        # Tables [draft tokens, accepted] of numbers of drafts, flattened. Both indices start with -1 and
        # end with most + 1: what is out of range on a device is clamped there and found by `snapshot`.
        self._width = num_speculative_tokens + 3
        self._on_host = [0] * self._width**2
        self._on_devices: dict[torch.device, Tensor] = {}

    def observe(
        self,
        num_accepted: Counts,
        num_draft_tokens: Counts | None = None,
        *,
        cu_num_draft_tokens: Counts | None = None,
        num_invalid_draft_tokens: Counts | None = None,
        discarded: Flags | None = None,
    ) -> None:
        """Adds one step.

        Every argument is a tensor or, of the host, a NumPy array or a sequence. Tensors are on one device;
        numbers of the host beside a ``num_accepted`` of an accelerator are copied there.

        Args:
            num_accepted: ``[batch]`` int32 or int64, as ``verify_chain`` and ``count_accepted`` return it:
                accepted drafts, without the recovered or bonus token. Requests without draft tokens and
                discarded ones may have anything here.
            num_draft_tokens: ``[batch]`` int32 or int64, how many draft tokens each request had.
            cu_num_draft_tokens: ``[batch + 1]`` int32 or int64, instead: cumulative counts that start with
                0, as ``verify_chain`` takes them; or ``[batch]``, without that 0.
            num_invalid_draft_tokens: ``[batch]`` int32 or int64, how many of a request's draft tokens were
                struck out before verification (by a grammar, say, with -1 in their place). They do not
                count as draft tokens; the request still counts as a draft. Default: none.
            discarded: ``[batch]`` bool, True for requests whose result the engine throws away (stale after
                a preemption, prefill not finished). They count nowhere. Default: none.

        Raises:
            RuntimeError: An argument has the wrong shape, dtype or device; the message names it. Or, on the
                host, a number is out of range: nothing of the step is counted then. On a device that is
                found by ``snapshot``.
        """
        if (num_draft_tokens is None) == (cu_num_draft_tokens is None):
            got = "neither" if num_draft_tokens is None else "both"
            raise RuntimeError(
                "AcceptanceMetrics.observe: num_draft_tokens or cu_num_draft_tokens must be given, and one "
                f"alone, got {got}"
            )
        batch = _length("num_accepted", num_accepted)
        _check("num_accepted", num_accepted, "[batch]", batch, num_accepted)
        _check("num_draft_tokens", num_draft_tokens, "[batch]", batch, num_accepted)
        if cu_num_draft_tokens is not None and _length("cu_num_draft_tokens", cu_num_draft_tokens) != batch:
            _check("cu_num_draft_tokens", cu_num_draft_tokens, "[batch + 1]", batch + 1, num_accepted)
        else:
            _check("cu_num_draft_tokens", cu_num_draft_tokens, "[batch]", batch, num_accepted)
        _check("num_invalid_draft_tokens", num_invalid_draft_tokens, "[batch]", batch, num_accepted)
        _check("discarded", discarded, "[batch]", batch, num_accepted, (torch.bool,))
        counts = (num_accepted, num_draft_tokens, cu_num_draft_tokens, num_invalid_draft_tokens)
        if isinstance(num_accepted, Tensor) and num_accepted.device.type != "cpu":
            device = num_accepted.device
            self._observe_on_device(
                [_on(device, each, torch.int64) for each in counts], _on(device, discarded, torch.bool)
            )
        else:
            self._observe_on_host([_list(each) for each in counts], _list(discarded))

    def _observe_on_host(self, counts: list[list[int] | None], discarded: list[int] | None) -> None:
        # Loops, since at the sizes of a batch they take less time than the calls of torch that they replace.
        num_accepted, num_draft_tokens, cu_num_draft_tokens, num_invalid_draft_tokens = counts
        assert num_accepted is not None
        if num_draft_tokens is None:
            assert cu_num_draft_tokens is not None
            if len(cu_num_draft_tokens) == len(num_accepted):
                cu_num_draft_tokens = [0, *cu_num_draft_tokens]
            num_draft_tokens = [end - begin for begin, end in itertools.pairwise(cu_num_draft_tokens)]
        most, width = self._most, self._width
        cells = []
        for r, (accepted, drafted) in enumerate(zip(num_accepted, num_draft_tokens, strict=True)):
            if drafted == 0 or (discarded is not None and discarded[r]):
                continue
            valid = drafted if num_invalid_draft_tokens is None else drafted - num_invalid_draft_tokens[r]
            if not 0 <= accepted <= valid <= most:
                raise RuntimeError(
                    f"AcceptanceMetrics.observe: num_accepted must lie in {self._expected()}, "
                    f"got {accepted} of {valid} at index {r}"
                )
            cells.append((valid + 1) * width + accepted + 1)
        for cell in cells:
            self._on_host[cell] += 1

    def _observe_on_device(self, counts: list[Tensor | None], discarded: Tensor | None) -> None:
        num_accepted, num_draft_tokens, cu_num_draft_tokens, num_invalid_draft_tokens = counts
        assert num_accepted is not None
        if num_draft_tokens is None:
            assert cu_num_draft_tokens is not None
            if cu_num_draft_tokens.shape == num_accepted.shape:
                cu_num_draft_tokens = torch.nn.functional.pad(cu_num_draft_tokens, (1, 0))
            num_draft_tokens = cu_num_draft_tokens[1:] - cu_num_draft_tokens[:-1]
        is_draft = num_draft_tokens != 0
        if discarded is not None:
            is_draft &= ~discarded
        if num_invalid_draft_tokens is not None:
            num_draft_tokens = num_draft_tokens - num_invalid_draft_tokens
        most, width = self._most, self._width
        cells = torch.add(
            num_accepted.clamp(-1, most + 1), num_draft_tokens.clamp(-1, most + 1), alpha=width
        ).add_(width + 1)
        table = self._on_devices.get(num_accepted.device)
        if table is None:
            table = torch.zeros(width**2, dtype=torch.int64, device=num_accepted.device)
            self._on_devices[num_accepted.device] = table
        table.index_add_(0, cells, is_draft.to(torch.int64))

    def snapshot(self) -> AcceptanceSnapshot:
        """Reads the counters; waits for the device if numbers of one were observed.

        Returns:
            An :class:`AcceptanceSnapshot` of everything since the start or the last ``reset``.

        Raises:
            RuntimeError: A number observed on a device was out of range; ``reset`` clears it.
        """
        most, width = self._most, self._width
        flat = self._on_host
        for table in self._on_devices.values():
            flat = [a + b for a, b in zip(flat, table.tolist(), strict=True)]
        drafts = {
            (cell // width - 1, cell % width - 1): count for cell, count in enumerate(flat) if count != 0
        }
        wrong = sum(n for (valid, accepted), n in drafts.items() if not 0 <= accepted <= valid <= most)
        if wrong:
            raise RuntimeError(
                f"AcceptanceMetrics.snapshot: num_accepted must lie in {self._expected()}, "
                f"got {wrong} outside since the last reset"
            )
        num_drafts = sum(drafts.values())
        num_draft_tokens = sum(valid * count for (valid, _), count in drafts.items())
        num_accepted = sum(accepted * count for (_, accepted), count in drafts.items())
        positions = range(most)
        accepted_per_pos = [sum(n for (_, accepted), n in drafts.items() if accepted > i) for i in positions]
        return AcceptanceSnapshot(
            num_drafts=num_drafts,
            num_draft_tokens=num_draft_tokens,
            num_accepted_tokens=num_accepted,
            num_accepted_tokens_per_pos=tuple(accepted_per_pos),
            num_draft_tokens_per_pos=tuple(
                sum(n for (valid, _), n in drafts.items() if valid > i) for i in positions
            ),
            acceptance_length=1 + _ratio(num_accepted, num_drafts),
            acceptance_rate=_ratio(num_accepted, num_draft_tokens),
            acceptance_rate_per_pos=tuple(_ratio(accepted, num_drafts) for accepted in accepted_per_pos),
        )

    def reset(self) -> None:
        """Starts anew, without waiting for a device."""
        self._on_host = [0] * self._width**2
        for table in self._on_devices.values():
            table.zero_()

    def _expected(self) -> str:
        return f"[0, valid draft tokens], these in [0, num_speculative_tokens = {self._most}]"


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else math.nan


def _check(
    name: str,
    value: Counts | Flags | None,
    shape: str,
    size: int,
    num_accepted: Counts,
    dtypes: tuple[torch.dtype, ...] = (torch.int32, torch.int64),
) -> None:
    """Shape, dtype and device of an argument, without looking at its numbers."""
    if value is None:
        return
    length = _length(name, value)
    if length != size:
        elements = "element" if size == 1 else "elements"
        raise RuntimeError(
            f"AcceptanceMetrics.observe: {name} must be {shape} with {size} {elements}, got {length}"
        )
    if not isinstance(value, Tensor):
        return
    if value.dtype not in dtypes:
        expected, got = (" or ".join(map(_name, names)) for names in (dtypes, (value.dtype,)))
        raise RuntimeError(f"AcceptanceMetrics.observe: {name} must be {expected}, got {got}")
    device = num_accepted.device if isinstance(num_accepted, Tensor) else torch.device("cpu")
    if value.device != device:
        raise RuntimeError(
            f"AcceptanceMetrics.observe: {name} must be on {device} like num_accepted, got {value.device}"
        )


def _length(name: str, value: object) -> int:
    if isinstance(value, (Tensor, np.ndarray)):
        if value.ndim == 1:
            return value.shape[0]
        got = f"shape {list(value.shape)}"
    elif isinstance(value, Sequence):
        return len(value)
    else:
        got = type(value).__name__
    raise RuntimeError(f"AcceptanceMetrics.observe: {name} must be a vector or a sequence, got {got}")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _list(value: Counts | Flags | None) -> list[int] | None:
    if value is None:
        return None
    numbers: list[int] = value.tolist() if isinstance(value, (Tensor, np.ndarray)) else list(value)
    return numbers


def _on(device: torch.device, value: Counts | Flags | None, dtype: torch.dtype) -> Tensor | None:
    if value is None or isinstance(value, Tensor):
        return value
    return torch.tensor(value, dtype=dtype).to(device, non_blocking=True)
