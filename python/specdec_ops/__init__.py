"""Exact, fast verification of drafts for speculative decoding."""

from specdec_ops._library import load_backends as _load_backends
from specdec_ops._status import Status
from specdec_ops.backend import backend
from specdec_ops.config import show_config
from specdec_ops.host_copy import HostCopy, HostCopyHandle
from specdec_ops.metrics import AcceptanceMetrics, AcceptanceSnapshot
from specdec_ops.ops.advance_draft_step import advance_draft_step_
from specdec_ops.ops.apply_logit_processors import apply_logit_processors_
from specdec_ops.ops.combine_sampled_and_draft_tokens import combine_sampled_and_draft_tokens_
from specdec_ops.ops.compute_slot_mapping import compute_slot_mapping, compute_slot_mapping_
from specdec_ops.ops.count_accepted import CountAcceptedOutput, count_accepted
from specdec_ops.ops.count_emitted_and_rejected import (
    CountEmittedAndRejectedOutput,
    count_emitted_and_rejected,
    count_emitted_and_rejected_,
)
from specdec_ops.ops.expand_dflash_inputs import (
    ExpandDFlashInputsOutput,
    expand_dflash_inputs,
    expand_dflash_inputs_,
)
from specdec_ops.ops.expand_draft_inputs import (
    ExpandDraftInputsOutput,
    expand_draft_inputs,
    expand_draft_inputs_,
)
from specdec_ops.ops.expand_draft_logits import expand_draft_logits, expand_draft_logits_
from specdec_ops.ops.expand_request_indices import (
    ExpandRequestIndicesOutput,
    expand_request_indices,
    expand_request_indices_,
)
from specdec_ops.ops.expand_to_drafts import expand_to_drafts, expand_to_drafts_
from specdec_ops.ops.gather_draft_tokens import (
    GatherDraftTokensOutput,
    gather_draft_tokens,
    gather_draft_tokens_,
)
from specdec_ops.ops.map_draft_tokens import map_draft_tokens
from specdec_ops.ops.plan_verification import PlanVerificationOutput, plan_verification
from specdec_ops.ops.prepare_next_tokens import (
    PrepareNextTokensOutput,
    prepare_next_tokens,
    prepare_next_tokens_,
)
from specdec_ops.ops.prepare_padded_draft_inputs import (
    PreparePaddedDraftInputsOutput,
    prepare_padded_draft_inputs,
    prepare_padded_draft_inputs_,
)
from specdec_ops.ops.prepare_positions_and_seq_lens import prepare_positions_and_seq_lens_
from specdec_ops.ops.row_statistics import RowStatisticsOutput, row_statistics
from specdec_ops.ops.sample import SampleOutput, sample
from specdec_ops.ops.sample_recovered import SampleRecoveredOutput, sample_recovered
from specdec_ops.ops.sample_recovered_probs import sample_recovered_probs, sample_recovered_probs_
from specdec_ops.ops.token_logprobs import TokenLogprobsOutput, token_logprobs
from specdec_ops.ops.update_num_computed_tokens import update_num_computed_tokens_
from specdec_ops.ops.update_request_state import update_request_state_
from specdec_ops.ops.verify_argmax import verify_argmax, verify_argmax_
from specdec_ops.ops.verify_chain import VerifyChainOutput, verify_chain
from specdec_ops.ops.verify_probs import verify_probs, verify_probs_
from specdec_ops.warmup import WarmupReport, warmup

_load_backends()

__version__ = "0.1.0"
__all__ = [
    "AcceptanceMetrics",
    "AcceptanceSnapshot",
    "CountAcceptedOutput",
    "CountEmittedAndRejectedOutput",
    "ExpandDFlashInputsOutput",
    "ExpandDraftInputsOutput",
    "ExpandRequestIndicesOutput",
    "GatherDraftTokensOutput",
    "HostCopy",
    "HostCopyHandle",
    "PlanVerificationOutput",
    "PrepareNextTokensOutput",
    "PreparePaddedDraftInputsOutput",
    "RowStatisticsOutput",
    "SampleOutput",
    "SampleRecoveredOutput",
    "Status",
    "TokenLogprobsOutput",
    "VerifyChainOutput",
    "WarmupReport",
    "advance_draft_step_",
    "apply_logit_processors_",
    "backend",
    "combine_sampled_and_draft_tokens_",
    "compute_slot_mapping",
    "compute_slot_mapping_",
    "count_accepted",
    "count_emitted_and_rejected",
    "count_emitted_and_rejected_",
    "expand_dflash_inputs",
    "expand_dflash_inputs_",
    "expand_draft_inputs",
    "expand_draft_inputs_",
    "expand_draft_logits",
    "expand_draft_logits_",
    "expand_request_indices",
    "expand_request_indices_",
    "expand_to_drafts",
    "expand_to_drafts_",
    "gather_draft_tokens",
    "gather_draft_tokens_",
    "map_draft_tokens",
    "plan_verification",
    "prepare_next_tokens",
    "prepare_next_tokens_",
    "prepare_padded_draft_inputs",
    "prepare_padded_draft_inputs_",
    "prepare_positions_and_seq_lens_",
    "row_statistics",
    "sample",
    "sample_recovered",
    "sample_recovered_probs",
    "sample_recovered_probs_",
    "show_config",
    "token_logprobs",
    "update_num_computed_tokens_",
    "update_request_state_",
    "verify_argmax",
    "verify_argmax_",
    "verify_chain",
    "verify_probs",
    "verify_probs_",
    "warmup",
]
