"""One engine in a process of its own: answers every group of requests and writes what came out as JSON.

    python tests_vllm/engine_run.py '{"mode": "n-gram", "groups": ["greedy"], "folder": "/tmp/x"}'

A process each, since vLLM's registry of kernels cannot be filled a second time once numba is loaded.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Collection
from pathlib import Path
from typing import Any

import checkpoints
import torch

NUM_DRAFT_TOKENS = 3
#: Conditional rates are these over their predecessors: a draft is accepted with 0.9, 2/3, 1/2.
SYNTHETIC_RATES = [0.9, 0.6, 0.3]
#: Samples of each law, and tokens of each sample. The first token follows a prefill and no draft.
NUM_SAMPLES, NUM_TOKENS = 1500, 5
NUM_SEEDED, SEEDED_TOKENS = 12, 12
GREEDY_TOKENS = 48

#: The laws that are sampled, together in one batch.
LAWS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.8},
    "top-k": {"temperature": 1.0, "top_k": 5},
    "top-k and top-p": {"temperature": 0.9, "top_k": 8, "top_p": 0.8},
    "penalties": {
        "temperature": 0.9,
        "top_k": 8,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.4,
    },
}
#: Nearly the first law: what the comparison of laws has to tell apart.
NEAR_LAW = {"temperature": 0.9}
#: Greedy requests with what a request can ask for beside; each must give the text of plain decoding.
GREEDY: dict[str, dict[str, Any]] = {
    "plain": {},
    "penalties": {"repetition_penalty": 1.2, "presence_penalty": 0.4, "frequency_penalty": 0.3},
    "allowed tokens": {"allowed_token_ids": list(range(0, 256, 3))},
    "min tokens": {"min_tokens": 20, "stop_token_ids": list(range(0, 256, 2))},
    "logprobs": {"logprobs": 3},
}


def speculative_config(mode: str, paths: dict[str, str]) -> dict[str, Any] | None:
    drafter, _, variant = mode.partition(", ")
    config = {
        "plain": None,
        "n-gram": {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3},
        "draft model": {"method": "draft_model", "model": paths["draft"]},
        "target as draft": {"method": "draft_model", "model": paths["target"]},
        "EAGLE": {"method": "eagle", "model": paths["eagle"]},
    }[drafter]
    if config is None:
        return None
    config["num_speculative_tokens"] = NUM_DRAFT_TOKENS
    config |= {
        "": {},
        "sampled drafts": {"draft_sample_method": "probabilistic"},
        "synthetic": {
            "rejection_sample_method": "synthetic",
            "synthetic_acceptance_rates": SYNTHETIC_RATES,
        },
        "FLy": {"rejection_sample_method": "fly", "fly_window_size": 1},
        "block": {"rejection_sample_method": "block", "draft_sample_method": "probabilistic"},
    }[variant]
    return config


class Run:
    """The engine and what its steps returned."""

    def __init__(self, mode: str, folder: Path) -> None:
        from vllm import LLM

        paths = checkpoints.write_all(folder)
        self.llm = LLM(
            model=paths["target"],
            speculative_config=speculative_config(mode, paths),
            skip_tokenizer_init=True,
            enforce_eager=True,
            dtype="float32",
            max_model_len=256,
            max_num_seqs=256,
            max_num_batched_tokens=4096,
            seed=0,
            disable_log_stats=False,
        )
        self.chain = checkpoints.likely_text(96)

    def generate(self, prompts: list[list[int]], params: list[dict[str, Any]]) -> list[Any]:
        from vllm import SamplingParams

        return self.llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts],
            [SamplingParams(detokenize=False, **{"ignore_eos": True, **each}) for each in params],
            use_tqdm=False,
        )

    def unconstrained(self) -> dict[str, Any]:
        """Greedy requests that ask for nothing beside: the drafter knows all that there is to know."""
        return self.greedy(("plain",))

    def greedy(self, kinds: Collection[str] = GREEDY) -> dict[str, Any]:
        prompts = [self.chain[:8], self.chain[40:57], self.chain[20:52]]
        results = {}
        for name in kinds:
            more = GREEDY[name]
            params = {"temperature": 0.0, "max_tokens": GREEDY_TOKENS, **more}
            completions = [out.outputs[0] for out in self.generate(prompts, [params] * len(prompts))]
            results[name] = {"token_ids": [list(each.token_ids) for each in completions]}
            if "logprobs" in more:
                results[name]["logprobs"] = [
                    [{str(i): entry.logprob for i, entry in step.items()} for step in each.logprobs]
                    for each in completions
                ]
        return results

    def sampled(self) -> dict[str, Any]:
        laws = {**LAWS, "near": NEAR_LAW}
        params = [{"n": NUM_SAMPLES, "max_tokens": NUM_TOKENS, **law} for law in laws.values()]
        # Greedy requests share the batch.
        params.append({"temperature": 0.0, "max_tokens": GREEDY_TOKENS})
        outputs = self.generate([self.chain] * len(params), params)
        samples = [[list(each.token_ids) for each in out.outputs] for out in outputs]
        return {**dict(zip(laws, samples, strict=False)), "greedy": samples[-1]}

    def seeded(self) -> list[dict[str, list[int]]]:
        """The same seeded requests twice: in another order, among others, in other batches."""
        requests = [(self.chain[seed : seed + 20], {"seed": seed}) for seed in range(NUM_SEEDED)]
        others = [(self.chain[seed : seed + 9], {}) for seed in range(7)]
        twice = []
        for order in (requests, [*others, *reversed(requests)]):
            params = [
                {"temperature": 1.0, "top_k": 20, "max_tokens": SEEDED_TOKENS, **more} for _, more in order
            ]
            outputs = self.generate([prompt for prompt, _ in order], params)
            seeds = [more.get("seed") for _, more in order]
            twice.append(
                {
                    str(seed): list(out.outputs[0].token_ids)
                    for seed, out in zip(seeds, outputs, strict=True)
                    if seed is not None
                }
            )
        return twice

    def counters(self) -> dict[str, Any]:
        """The engine's own counters."""
        prefix = "vllm:spec_decode_"
        return {
            metric.name.removeprefix(prefix): metric.values if hasattr(metric, "values") else metric.value
            for metric in self.llm.get_metrics()
            if metric.name.startswith(prefix)
        }


def observe_steps() -> tuple[Any, list[int]]:
    """Has every rejection sampler's result counted by the package's own metrics.

    Returns them, and the numbers of steps without and with a draft law.
    """
    import specdec_ops
    from vllm.v1.sample.rejection_sampler import RejectionSampler

    metrics = specdec_ops.AcceptanceMetrics(NUM_DRAFT_TOKENS)
    forward, steps = RejectionSampler.forward, [0, 0]

    def observed(self: Any, metadata: Any, draft_probs: Any, *args: Any, **kwargs: Any) -> Any:
        output = forward(self, metadata, draft_probs, *args, **kwargs)
        steps[draft_probs is not None] += 1
        accepted = specdec_ops.count_accepted(output.sampled_token_ids).num_accepted
        metrics.observe(accepted, cu_num_draft_tokens=metadata.cu_num_draft_tokens)
        return output

    RejectionSampler.forward = observed
    return metrics, steps


def plugin_report(worker: Any = None) -> dict[str, Any]:
    """What the plug-in says of the process that runs the model."""
    report = sys.modules.get("specdec_ops.integrations.vllm._report")
    return {
        "pid": os.getpid(),
        "replaced": [name for name, each in report.replacements.items() if each.replaced] if report else [],
        "calls": dict(report.calls) if report else {},
        "handed over": dict(report.handed_over) if report else {},
    }


def main() -> None:
    job = json.loads(sys.argv[1])
    folder = Path(job["folder"])
    result: dict[str, Any] = {"seconds": {}, "pid": os.getpid()}
    start = time.perf_counter()

    def lap(name: str) -> None:
        nonlocal start
        result["seconds"][name] = round(time.perf_counter() - start, 1)
        start = time.perf_counter()

    if os.environ["SPECDEC_OPS_VLLM"] == "0":
        # What stock vLLM leaves unwritten shall not look right by chance: it reads as NaN or 2**31 - 1.
        torch.use_deterministic_algorithms(True, warn_only=True)
    run = Run(job["mode"], folder)
    lap("start")
    in_process = os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    observed = observe_steps() if in_process and job["mode"] != "plain" else None
    for group in job["groups"]:
        try:
            result[group] = getattr(run, group)()
        except Exception:
            result[group] = {"error": traceback.format_exc()}
            break
        lap(group)
        result[f"counters after {group}"] = run.counters()
    if observed is not None:
        metrics, result["steps without and with a draft law"] = observed
        result["metrics"] = metrics.snapshot()._asdict()
    result["plug-in"] = plugin_report() if in_process else run.llm.collective_rpc(plugin_report)[0]
    (folder / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
