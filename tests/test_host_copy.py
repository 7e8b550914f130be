"""HostCopy: values on the host as they were at the call, without waiting before they are read."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from specdec_ops import host_copy
from specdec_ops.host_copy import HostCopy

ACCELERATOR = torch.accelerator.current_accelerator()
DEVICES = ["cpu", *([str(ACCELERATOR)] if ACCELERATOR is not None else [])]
on_accelerator = pytest.mark.skipif(ACCELERATOR is None, reason="no device but the CPU")


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return request.param


class TestContract:
    @pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32, torch.bfloat16, torch.bool])
    @pytest.mark.parametrize("shape", [(), (0,), (5,), (3, 4), (2, 3, 4)])
    def test_values_shape_and_dtype(self, device: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        values = torch.arange(2, 2 + torch.Size(shape).numel()).reshape(shape).to(dtype)
        handle = HostCopy()(values.to(device))
        assert handle.tolist() == values.tolist()
        host = handle.tensor()
        assert torch.equal(host, values) and host.dtype == dtype and host.device.type == "cpu"
        if dtype != torch.bfloat16:
            assert np.array_equal(handle.numpy(), values.numpy())
            assert handle.numpy().dtype == values.numpy().dtype

    def test_strided_tensors(self, device: str) -> None:
        wide = torch.arange(24).reshape(4, 6)
        for view in (lambda t: t[:, ::2], lambda t: t.t(), lambda t: t[1:3, 2], lambda t: t[:1].expand(3, 6)):
            host = HostCopy()(view(wide.to(device))).tensor()
            assert host.tolist() == view(wide).tolist()
            assert host.is_contiguous()

    def test_the_source_may_be_overwritten_right_after_the_call(self, device: str) -> None:
        copy, buffer = HostCopy(), torch.zeros(16, dtype=torch.int64, device=device)
        handles = []
        for step in range(50):
            buffer.fill_(step)
            handles.append(copy(buffer))
        buffer.fill_(-1)
        assert [handle.tolist() for handle in handles] == [[step] * 16 for step in range(50)]

    def test_the_source_may_be_freed_right_after_the_call(self, device: str) -> None:
        copy, handles = HostCopy(), []
        for step in range(50):
            handles.append(copy(torch.full((1000,), step, device=device)))
            torch.full((1000,), -1, device=device)
        assert all(handle.tolist() == [step] * 1000 for step, handle in enumerate(handles))

    def test_nothing_held_is_overwritten(self, device: str) -> None:
        """Not by later copies, neither through a tensor, an array nor a view of them."""
        copy, source = HostCopy(), torch.arange(8, device=device)
        kept = [copy(source).tensor(), copy(source).tensor()[2:], copy(source).numpy()[::2], copy(source)]
        for _ in range(50):
            copy(source.neg()).wait()
        assert kept[0].tolist() == list(range(8))
        assert kept[1].tolist() == list(range(2, 8))
        assert kept[2].tolist() == [0, 2, 4, 6]
        assert kept[3].tolist() == list(range(8))

    def test_what_is_returned_is_the_callers_to_write(self, device: str) -> None:
        source = torch.zeros(4, device=device)
        handle = HostCopy()(source)
        handle.tensor().fill_(7)
        assert source.tolist() == [0.0] * 4
        assert handle.tolist() == [7.0] * 4

    def test_shapes_may_change_and_reads_come_in_any_order(self, device: str) -> None:
        copy = HostCopy()
        sizes = [3, 0, 500, 1, 7]
        handles = [copy(torch.full((size,), size, device=device)) for size in sizes]
        for size, handle in reversed(list(zip(sizes, handles, strict=True))):
            assert handle.tolist() == [size] * size

    def test_ready_after_wait(self, device: str) -> None:
        handle = HostCopy()(torch.ones(3, device=device))
        handle.wait()
        assert handle.ready()
        assert handle.tensor() is handle.tensor()

    def test_gradients_stay_behind(self, device: str) -> None:
        handle = HostCopy()(torch.ones(2, device=device, requires_grad=True))
        assert handle.numpy().tolist() == [1.0, 1.0]
        assert not handle.tensor().requires_grad


class TestOnTheCpu:
    def test_no_stream_or_event_is_made_or_used(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Nor are those of the caller looked at: an engine passes what it has."""
        monkeypatch.setattr(host_copy, "_Accelerator", lambda *_: pytest.fail("made"))
        source = torch.arange(3)
        copy = HostCopy(stream=object())  # type: ignore[arg-type]
        handle = copy(source, stream=object(), event=object())  # type: ignore[arg-type]
        source.zero_()
        assert handle.ready()
        assert handle.tolist() == [0, 1, 2]

    def test_torch_is_left_as_it_is(self) -> None:
        names = ("Stream", "Event", "Tensor")
        before = [getattr(torch, name) for name in names] + [vars(torch.accelerator).copy()]
        HostCopy()(torch.ones(2)).wait()
        assert [getattr(torch, name) for name in names] + [vars(torch.accelerator).copy()] == before


class Recorder:
    """Stands in for an accelerator: notes calls, and runs transfers only when an event is waited for."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.transfers: list[Callable[[], Any]] = []
        self.stream = RecordedStream(self, "side")
        self.completed = False

    def current_stream(self) -> RecordedStream:
        return RecordedStream(self, "current")

    def event(self) -> RecordedEvent:
        return RecordedEvent(self, "done")

    def snapshot(self, tensor: torch.Tensor, reader: RecordedStream) -> torch.Tensor:
        self.log.append(f"snapshot kept for {reader.name}")
        return tensor.clone()

    def pinned_like(self, tensor: torch.Tensor) -> torch.Tensor:
        host = torch.full_like(tensor, -99).as_subclass(Pinned)
        host.recorder = self
        return host


class Pinned(torch.Tensor):
    """Memory of the host whose copies come later."""

    recorder: Recorder

    def copy_(self, source: torch.Tensor, non_blocking: bool = False) -> Pinned:
        self.recorder.log.append(f"copy non_blocking={non_blocking}")
        self.recorder.transfers.append(lambda: torch.Tensor.copy_(self, source))
        return self


class RecordedStream:
    def __init__(self, recorder: Recorder, name: str, device: str = "cpu") -> None:
        self.recorder, self.name, self.device = recorder, name, torch.device(device)

    def wait_stream(self, other: RecordedStream) -> None:
        self.recorder.log.append(f"{self.name} waits for {other.name}")

    def __enter__(self) -> None:
        self.recorder.log.append(f"enter {self.name}")

    def __exit__(self, *_: object) -> None:
        self.recorder.log.append(f"exit {self.name}")


class RecordedEvent:
    def __init__(self, recorder: Recorder, name: str) -> None:
        self.recorder, self.name = recorder, name

    def record(self, stream: RecordedStream) -> None:
        self.recorder.log.append(f"record {self.name} on {stream.name}")

    def query(self) -> bool:
        self.recorder.log.append(f"query {self.name}")
        return self.recorder.completed

    def synchronize(self) -> None:
        self.recorder.log.append(f"synchronize {self.name}")
        for transfer in self.recorder.transfers:
            transfer()


class RecordedHostCopy(HostCopy):
    """Copies tensors of the CPU as if they were a recorder's."""

    def __init__(self, recorder: Recorder, **options: Any) -> None:
        super().__init__(**options)
        self.recorder = recorder

    def _accelerator(self, device: torch.device) -> Any:
        return self.recorder


class TestOrderOfCalls:
    def started_on(self, side: str, event: str = "done") -> list[str]:
        return [
            f"snapshot kept for {side}",
            f"{side} waits for current",
            f"enter {side}",
            "copy non_blocking=True",
            f"exit {side}",
            f"record {event} on {side}",
        ]

    def test_the_side_stream_waits_and_the_host_does_not(self) -> None:
        recorder = Recorder()
        RecordedHostCopy(recorder)(torch.arange(3))
        assert recorder.log == self.started_on("side")

    @pytest.mark.parametrize("read", ["wait", "tensor", "numpy", "tolist"])
    def test_reading_waits_for_the_event_once(self, read: str) -> None:
        recorder = Recorder()
        source = torch.arange(3)
        handle = RecordedHostCopy(recorder)(source)
        source.zero_()
        recorder.log.clear()
        getattr(handle, read)()
        assert recorder.log == ["synchronize done"]
        assert handle.tolist() == [0, 1, 2]
        assert handle.ready()
        assert recorder.log == ["synchronize done"]

    def test_ready_polls_and_never_waits(self) -> None:
        recorder = Recorder()
        handle = RecordedHostCopy(recorder)(torch.arange(3))
        recorder.log.clear()
        assert not handle.ready()
        recorder.completed = True
        assert handle.ready()
        assert recorder.log == ["query done"] * 2

    def test_streams_and_events_of_the_caller(self) -> None:
        recorder = Recorder()
        mine, other = RecordedStream(recorder, "mine"), RecordedStream(recorder, "other")
        copy = RecordedHostCopy(recorder, stream=mine)
        copy(torch.arange(3))
        assert recorder.log == self.started_on("mine")
        recorder.log.clear()
        handle = copy(torch.arange(3), stream=other, event=RecordedEvent(recorder, "given"))
        assert recorder.log == self.started_on("other", "given")
        handle.wait()
        assert recorder.log[-1] == "synchronize given"

    def test_a_stream_of_another_device_is_refused_before_anything_is_done(self) -> None:
        recorder = Recorder()
        elsewhere = RecordedStream(recorder, "elsewhere", "meta")
        with pytest.raises(
            RuntimeError, match="HostCopy: stream must be of cpu like tensor, got one of meta"
        ):
            RecordedHostCopy(recorder)(torch.arange(3), stream=elsewhere)  # type: ignore[arg-type]
        assert recorder.log == []


class TestBadInput:
    def test_no_tensor(self) -> None:
        with pytest.raises(RuntimeError, match="HostCopy: tensor must be a tensor, got list"):
            HostCopy()([1, 2])  # type: ignore[arg-type]

    def test_meta(self) -> None:
        with pytest.raises(RuntimeError, match="HostCopy: tensor must hold values, got a meta tensor"):
            HostCopy()(torch.zeros(2, device="meta"))


def keep_busy(device: str) -> torch.Tensor:
    """Queues work that takes the device far longer than a small copy."""
    a = torch.full((4096, 4096), 1e-3, device=device)
    for _ in range(60):
        a = a @ a
    return a


@contextlib.contextmanager
def without_waiting(device: str) -> Iterator[None]:
    """Fails if the device was waited for: its queue must not have drained in between."""
    keep_busy(device)
    behind = torch.Event(device)
    behind.record(torch.accelerator.current_stream(device))
    yield
    assert not behind.query(), "the queue is empty: something waited, or the work was too short"


@on_accelerator
class TestOnAnAccelerator:
    device = str(ACCELERATOR)

    def test_waits_for_a_delayed_producer(self) -> None:
        copy = HostCopy()
        copy(torch.zeros(1, device=self.device)).wait()
        keep_busy(self.device)[0, 0].item()  # libraries are loaded
        produced = torch.zeros(8, dtype=torch.int64, device=self.device)
        with without_waiting(self.device):
            produced.fill_(5)
            handle = copy(produced)
            produced.fill_(-1)
            assert not handle.ready()
        assert handle.tolist() == [5] * 8
        assert produced.tolist() == [-1] * 8

    def test_later_work_is_not_waited_for(self) -> None:
        copy = HostCopy()
        copy(torch.zeros(1, device=self.device)).wait()
        handle = copy(torch.full((8,), 3, device=self.device))
        with without_waiting(self.device):
            assert handle.tolist() == [3] * 8

    def test_runs_behind_the_current_stream_of_the_caller(self) -> None:
        copy, stream = HostCopy(), torch.Stream(self.device)
        with stream:
            keep_busy(self.device)
            handle = copy(torch.full((8,), 4, device=self.device))
            assert torch.accelerator.current_stream(self.device) == stream
        assert handle.tolist() == [4] * 8

    def test_memory_is_pinned_and_used_again(self) -> None:
        copy = HostCopy()
        addresses = set()
        for size in [40, 33, 64] * 30:
            host = copy(torch.zeros(size, dtype=torch.int64, device=self.device)).tensor()
            assert host.is_pinned()
            addresses.add(host.data_ptr())
            del host
        assert len(addresses) <= 4

    def test_a_stream_and_an_event_of_the_caller(self) -> None:
        stream, event = torch.Stream(self.device), torch.Event(self.device)
        handle = HostCopy(stream=stream)(torch.full((8,), 4, device=self.device), event=event)
        event.synchronize()
        assert handle.ready() and handle.tolist() == [4] * 8

    def test_every_device_whichever_is_current(self) -> None:
        current = torch.accelerator.current_device_index()
        copy = HostCopy()
        for index in range(torch.accelerator.device_count()):
            device = torch.device(self.device.partition(":")[0], index)
            assert copy(torch.full((8,), index, device=device)).tolist() == [index] * 8
        assert torch.accelerator.current_device_index() == current

    def test_a_stream_of_the_cpu_is_refused(self) -> None:
        stream: Any = RecordedStream(Recorder(), "side")
        with pytest.raises(RuntimeError, match=r"HostCopy: stream must be of .* like tensor, got one of cpu"):
            HostCopy(stream=stream)(torch.zeros(2, device=self.device))
