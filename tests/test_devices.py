"""Tensors of other devices: the same results as on the CPU."""

import pytest
import specdec_ops
import torch

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
