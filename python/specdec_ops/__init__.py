"""Exact, fast verification of drafts for speculative decoding."""

from specdec_ops._library import load_backends as _load_backends
from specdec_ops._status import Status
from specdec_ops.config import show_config
from specdec_ops.ops.count_accepted import CountAcceptedOutput, count_accepted
from specdec_ops.ops.sample import SampleOutput, sample
from specdec_ops.ops.sample_recovered import SampleRecoveredOutput, sample_recovered
from specdec_ops.ops.verify_chain import VerifyChainOutput, verify_chain

_load_backends()

__version__ = "0.1.0"
__all__ = [
    "CountAcceptedOutput",
    "SampleOutput",
    "SampleRecoveredOutput",
    "Status",
    "VerifyChainOutput",
    "count_accepted",
    "sample",
    "sample_recovered",
    "show_config",
    "verify_chain",
]
