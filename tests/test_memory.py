"""Peak extra memory: no temporary of the size of the logits.

Measured in a process of its own as the growth of the peak resident set across one call, with the
peak reset before it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import inputs
import pytest
import torch

BATCH, NUM_DRAFTS, VOCAB_SIZE = 64, 7, 262_144
NUM_THREADS = 2
LIMIT = (1 << 20) + NUM_THREADS * (64 << 10)

PROGRAM = """
import json, sys
import torch
import specdec_ops

def peak():
    for line in open("/proc/self/status"):
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024

def growth(call):
    call()
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    before = peak()
    call()
    return peak() - before

batch, k, vocab_size, threads, dtype, draft_law, extras = json.loads(sys.argv[1])
torch.set_num_threads(threads)
dtype = getattr(torch, dtype)
num_drafts, random = batch * k, torch.Generator().manual_seed(1)

def overlapping_rows(num_rows):
    buffer = (2 * torch.randn(vocab_size + 256 * num_rows, generator=random)).to(dtype)
    return buffer.as_strided((num_rows, vocab_size), (256, 1))

target = overlapping_rows(num_drafts + batch)
ids = torch.randint(0, vocab_size, (num_drafts,), generator=random)
law = {}
if draft_law in ("logits", "logits_and_logsumexp"):
    law["draft_logits"] = overlapping_rows(num_drafts)
if draft_law == "logits_and_logsumexp":
    law["draft_logsumexp"] = torch.full((num_drafts,), 14.5, dtype=torch.float64)
if draft_law == "probs":
    law["draft_probs"] = overlapping_rows(num_drafts)
if draft_law == "support":
    law["draft_support_ids"] = torch.randint(0, vocab_size, (num_drafts, 16), generator=random)
    law["draft_support_logprobs"] = torch.full((num_drafts, 16), -2.8)
cu = torch.arange(batch + 1) * k
temperature = torch.where(torch.arange(batch) % 4 == 0, 0.0, 1.0)
coins = torch.rand(num_drafts, generator=random) * (extras != "all-accepted")
names = ("return_logsumexp", "return_logprobs", "return_accept_probs")
asked = dict.fromkeys(names, True) if extras == "extras" else {}

def verify():
    return specdec_ops.verify_chain(
        target, ids, cu, temperature=temperature, accept_uniforms=coins,
        recovered_uniforms=torch.zeros(batch), **law, **asked,
    )

def sample():
    return specdec_ops.sample(target, seeds=1, positions=torch.arange(target.shape[0]))

def recover():
    return specdec_ops.sample_recovered(
        target[:num_drafts], ids, seeds=1, positions=torch.arange(num_drafts), **law
    )

print(json.dumps({
    "verify_chain": growth(verify),
    "sample": growth(sample),
    "sample_recovered": growth(recover),
    "one_row": growth(lambda: target[0].float().softmax(-1).add(1)),
    "few_rows": growth(lambda: target[:4].float().add(1)),
}))
"""


def measure(dtype: str, draft_law: str, extras: str, vocab_size: int = VOCAB_SIZE) -> dict[str, int]:
    arguments = json.dumps([BATCH, NUM_DRAFTS, vocab_size, NUM_THREADS, dtype, draft_law, extras])
    out = subprocess.run(
        [sys.executable, "-c", PROGRAM, arguments],
        # Blocks from 64 KB on come from fresh pages, so that none hides in memory that was freed before.
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "MALLOC_MMAP_THRESHOLD_": "65536"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert out.returncode == 0, out.stderr
    return json.loads(out.stdout)


@pytest.mark.parametrize(
    ("dtype", "draft_law", "extras"),
    [
        ("bfloat16", "logits", "plain"),
        ("bfloat16", "logits_and_logsumexp", "all-accepted"),
        ("float32", "logits", "extras"),
        ("float32", "one_hot", "plain"),
        ("float16", "probs", "plain"),
        ("float32", "support", "plain"),
    ],
)
def test_peak_extra_memory(dtype: str, draft_law: str, extras: str) -> None:
    peaks = measure(dtype, draft_law, extras)
    for op in ("verify_chain", "sample", "sample_recovered"):
        assert peaks[op] < LIMIT, peaks
    # The same measure sees one float32 copy of four of the 512 rows, and more than one of a single row.
    assert peaks["few_rows"] > LIMIT and peaks["one_row"] > LIMIT, peaks


def test_extra_memory_does_not_grow_with_the_batch() -> None:
    """What torch's allocator hands out in one call: the outputs, and nothing like the logits."""
    import specdec_ops

    for batch in (1, 64):
        arguments = inputs.chain([NUM_DRAFTS] * batch, 300, "logits", seed=1)
        specdec_ops.verify_chain(**arguments)
        with torch.profiler.profile(profile_memory=True) as profile:
            out = specdec_ops.verify_chain(**arguments)
        allocated = sum(max(event.self_cpu_memory_usage, 0) for event in profile.events())
        outputs = sum(value.nbytes for value in out if value is not None)
        assert outputs <= allocated <= outputs + 2048 + 64 * batch
