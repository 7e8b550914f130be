"""The plug-in for vLLM: speculative decoding on CPU and GPU by way of this package.

vLLM finds :func:`register` by the entry point ``vllm.general_plugins`` and calls it in each of its
processes; nothing has to be imported or configured. ``SPECDEC_OPS_VLLM=0`` turns it off,
``SPECDEC_OPS_VLLM=all`` replaces ``gumbel_sample`` too, and ``python -m specdec_ops vllm`` says what is
replaced in the vLLM that is installed.

The functions in ``sampling_kernels``, ``drafting_kernels``, ``runner`` and ``runner_sampling`` have the
calling conventions of vLLM's kernels and of its newer model runner; they import nothing of vLLM.
"""

from specdec_ops.integrations.vllm._plugin import describe, install, register
from specdec_ops.integrations.vllm._report import Replacement

__all__ = ["Replacement", "describe", "install", "register"]
