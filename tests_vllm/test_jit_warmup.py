"""The engine's warm-up of Triton kernels, which takes no other kernels."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
import vllm.v1.sample.rejection_sampler as engine
from specdec_ops.integrations.vllm import _plugin
from vllm.model_executor.warmup.jit_warmup import JitWarmupRegistry
from vllm.platforms import current_platform
from vllm.v1.spec_decode import utils
from vllm.v1.worker import block_table


@pytest.fixture(scope="module", autouse=True)
def installed() -> None:
    _plugin.register()
    current_platform.register_triton_kernel_overrides()


def test_kernels_that_are_replaced_do_not_take_part() -> None:
    registry = JitWarmupRegistry(None)
    with registry.activate():
        engine.RejectionSampler(Mock(logprobs_mode="raw_logprobs", use_fp64_gumbel=False))
        utils._eagle_prepare_inputs_padded.register_warmup(max_batch_size=8)
        block_table._COMPUTE_SLOT_MAPPING_KERNEL.register_warmup(block_table_stride=3)
    assert len(registry) == 0
    registry.warmup()


def test_other_kernels_take_part() -> None:
    launcher = Mock(kernel=Mock(spec=["arg_names"]))
    registry = JitWarmupRegistry(None)
    with registry.activate():
        JitWarmupRegistry.register(launcher, 1, size=2)
    assert registry._registrations == {launcher: [((1,), {"size": 2})]}
