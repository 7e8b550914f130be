"""Tensors of other devices: the same results as on the CPU."""

import pytest
import specdec_ops
import torch
from specdec_ops import _library

OTHER_DEVICES = ["cuda"] if torch.cuda.is_available() else []


@pytest.mark.skipif(not OTHER_DEVICES, reason="no device but the CPU")
@pytest.mark.parametrize("device", OTHER_DEVICES or ["none"])
def test_every_op_gives_the_results_of_the_cpu_on_the_device_of_its_tensors(device: str) -> None:
    torch.manual_seed(0)
    logits, drafts = torch.randn(7, 5000), torch.randint(5000, (4,))
    cu, positions = torch.tensor([0, 1, 1, 4]), torch.tensor([3, 5, 9])
    draft_logits = torch.randn(4, 5000)

    def results(device: str) -> list[torch.Tensor]:
        verified = specdec_ops.verify_chain(
            logits.to(device),
            drafts.to(device),
            cu.to(device),
            draft_logits=draft_logits.to(device),
            seeds=7,
            positions=positions.to(device),
            return_logsumexp=True,
        )
        sampled = specdec_ops.sample(logits[:3].to(device), seeds=7, positions=positions.to(device))
        recovered = specdec_ops.sample_recovered(
            logits[:4].to(device), drafts.to(device), seeds=7, positions=torch.arange(4, device=device)
        )
        counted = specdec_ops.count_accepted(verified.token_ids)
        return [t for t in (*verified, *sampled, *recovered, *counted) if t is not None]

    for there, here in zip(results(device), results("cpu"), strict=True):
        assert there.device.type == device
        torch.testing.assert_close(there.cpu(), here, rtol=0, atol=0, equal_nan=True)


class TestWithoutAKernel:
    """What serves a device that has no kernel, called directly: tensors that say they are elsewhere."""

    class Elsewhere(torch.Tensor):
        """A tensor of the CPU that names another device until it is copied to the CPU."""

        device = torch.device("xpu:0")

        def cpu(self) -> torch.Tensor:
            return self.as_subclass(torch.Tensor).clone()

    def test_tensors_go_by_way_of_the_cpu(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        returned: list[object] = []
        monkeypatch.setattr(
            torch.Tensor, "to", lambda tensor, device: returned.append(device) or tensor, raising=True
        )
        _library._warn_once.cache_clear()
        _library._without_native_kernel.cache_clear()
        call = _library._fallback("count_accepted", lambda *_: pytest.fail("the reference was called"))
        ids = torch.tensor([[5, 6, -1]])
        accepted, emitted = call(ids.as_subclass(self.Elsewhere))
        assert (accepted.tolist(), emitted.tolist()) == ([1], [2])
        assert returned == [torch.device("xpu:0")] * 2
        assert "count_accepted: no native kernel for xpu tensors, computing on the CPU" in caplog.text

    def test_what_an_op_writes_to_its_copies_is_copied_back(self) -> None:
        call = _library._fallback("expand_to_drafts_", lambda *_: pytest.fail("the reference was called"))
        values, out = torch.tensor([5, 6]), torch.zeros(3, dtype=torch.int64)
        there = [tensor.as_subclass(self.Elsewhere) for tensor in (values, torch.tensor([0, 1, 3]), out)]
        assert call(*there[:2], None, None, there[2]) is None
        assert out.tolist() == [5, 6, 6]
        assert values.tolist() == [5, 6]

    def test_the_reference_serves_where_nothing_was_built(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(_library, "_has_native_cpu", lambda: False)
        call = _library._fallback("count_accepted", lambda ids: ids + 1)
        assert call(torch.tensor([1])).tolist() == [2]

    def test_mixed_devices_are_refused(self) -> None:
        call = _library._fallback("sample", lambda *_: pytest.fail("the reference was called"))
        elsewhere = torch.zeros(1).as_subclass(self.Elsewhere)
        with pytest.raises(
            RuntimeError, match=r"sample: every tensor must be on xpu:0 like the first, got cpu"
        ):
            call(elsewhere, torch.zeros(1))
