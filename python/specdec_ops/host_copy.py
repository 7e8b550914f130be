"""HostCopy: what a runner reads on the host each step, copied without stopping the device."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor


class HostCopyHandle:
    """One copy under way, as :class:`HostCopy` returns it.

    Its memory is its own: no later copy writes there while the handle, or a tensor or array taken from it,
    is alive.

    Example:
        >>> import torch, specdec_ops
        >>> handle = specdec_ops.HostCopy()(torch.tensor([1, 0, 2]))
        >>> handle.tensor().sum().item(), handle.tolist()
        (3, [1, 0, 2])
    """

    __slots__ = ("_done", "_host")

    def __init__(self, host: Tensor, done: torch.Event | None) -> None:
        """For :class:`HostCopy` alone; ``done`` is None if the values are there already."""
        self._host = host
        self._done = done

    def ready(self) -> bool:
        """Whether the values are there; never waits."""
        return self._done is None or bool(self._done.query())

    def wait(self) -> None:
        """Waits until the values are there: for this copy, not for what was queued after it."""
        if self._done is not None:
            self._done.synchronize()
            self._done = None

    def tensor(self) -> Tensor:
        """Waits, then returns the values: contiguous, on the CPU, the same tensor each time."""
        self.wait()
        return self._host

    def numpy(self) -> npt.NDArray[Any]:
        """Waits, then returns the values as an array that shares the tensor's memory.

        Raises:
            TypeError: NumPy lacks the dtype (bfloat16).
        """
        return self.tensor().numpy()

    def tolist(self) -> Any:
        """Waits, then returns the values as Python numbers, in lists nested like the tensor's shape."""
        return self.tensor().tolist()


class HostCopy:
    """Copies small tensors to the host: draft ids, sampled counts, accepted counts.

    ``copy(tensor)`` starts a copy and returns at once; the handle's ``tensor()``, ``numpy()`` and
    ``tolist()`` wait for it. The values are those that the tensor has at that point of the current stream
    of its device. From then on the tensor is the caller's again: it may be overwritten, or freed, right
    after the call. Any number of copies may be under way, of any shapes and dtypes, and be read in any
    order.

    On an accelerator the copy runs on a side stream, one for each device, that waits for the current stream;
    the current stream never waits for the side stream. The tensor is first copied on its device, so that
    what comes after it on the current stream can't overtake the transfer. The host's memory is pinned and
    comes from torch's cache of pinned memory: what a dropped handle gives back serves a later copy, so that
    after the first steps no call allocates any. On the CPU a copy is a copy: done when the call returns,
    without streams or events. Nothing of torch is replaced.

    Args:
        stream: A stream of the caller's to copy on, instead of one of its own. On the CPU it is ignored.

    Source: the pattern of asynchronous transfers in the CUDA C++ Best Practices Guide, 10.1.2.

    Example:
        >>> import torch, specdec_ops
        >>> copy = specdec_ops.HostCopy()
        >>> num_accepted = torch.tensor([2, 0])  # where the model runs, also on an accelerator
        >>> handle = copy(num_accepted)
        >>> _ = num_accepted.zero_()  # the next step
        >>> handle.tolist()
        [2, 0]
    """

    def __init__(self, *, stream: torch.Stream | None = None) -> None:
        """Makes no stream yet: the first copy from a device does."""
        self._stream = stream
        self._accelerators: dict[torch.device, _Accelerator] = {}

    def __call__(
        self, tensor: Tensor, *, stream: torch.Stream | None = None, event: torch.Event | None = None
    ) -> HostCopyHandle:
        """Starts a copy.

        Args:
            tensor: Any shape, dtype and strides, on the CPU or an accelerator.
            stream: A stream of the tensor's device to copy on, for this call. Default: that of the object,
                or one of its own. On the CPU it is ignored.
            event: An event of the caller's that is recorded behind the copy and that the handle waits for.
                Recorded again by the caller, it makes the handle wait for that too. Default: a new one. On
                the CPU it is ignored.

        Returns:
            A :class:`HostCopyHandle`.

        Raises:
            RuntimeError: ``tensor`` is no tensor or has no values (meta), or ``stream`` is of another device.
        """
        if not isinstance(tensor, Tensor):
            raise RuntimeError(f"HostCopy: tensor must be a tensor, got {type(tensor).__name__}")
        if tensor.is_meta:
            raise RuntimeError("HostCopy: tensor must hold values, got a meta tensor")
        tensor = tensor.detach()
        accelerator = self._accelerator(tensor.device)
        if accelerator is None:
            return HostCopyHandle(tensor.clone(memory_format=torch.contiguous_format), None)
        side = stream or self._stream or accelerator.stream
        if side.device != tensor.device:
            raise RuntimeError(
                f"HostCopy: stream must be of {tensor.device} like tensor, got one of {side.device}"
            )
        snapshot = accelerator.snapshot(tensor, side)
        host = accelerator.pinned_like(snapshot)
        side.wait_stream(accelerator.current_stream())
        with side:
            host.copy_(snapshot, non_blocking=True)
        done = accelerator.event() if event is None else event
        done.record(side)
        return HostCopyHandle(host, done)

    def _accelerator(self, device: torch.device) -> _Accelerator | None:
        """What drives the streams of a device; None if its copies need none."""
        if device.type == "cpu":
            return None
        if device not in self._accelerators:
            self._accelerators[device] = _Accelerator(device)
        return self._accelerators[device]


class _Accelerator:
    """Streams, events and memory of one device, through the part of torch that knows no vendor."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.Stream(device)

    def current_stream(self) -> torch.Stream:
        return torch.accelerator.current_stream(self.device)

    def event(self) -> torch.Event:
        return torch.Event(self.device)

    def snapshot(self, tensor: Tensor, reader: torch.Stream) -> Tensor:
        """A copy on the device, whose memory no other tensor gets before ``reader`` is done with it."""
        copy = tensor.clone(memory_format=torch.contiguous_format)
        copy.record_stream(reader)
        return copy

    def pinned_like(self, tensor: Tensor) -> Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
