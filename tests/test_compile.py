"""torch.library's own checks of each op, and torch.compile in one graph with dynamic shapes."""

from __future__ import annotations

from typing import Any

import inputs
import margins
import pytest
import specdec_ops
import torch
from specdec_ops.ops import count_accepted, sample, sample_recovered, verify_chain
from torch import Tensor

EXTRAS = {"return_logsumexp": True, "return_logprobs": True, "return_accept_probs": True}


def chain_call(draft_law: str, counts: list[int], seed: int = 1) -> tuple[tuple[Any, ...], dict[str, Any]]:
    arguments = inputs.chain(counts, 70, draft_law, seed=seed)
    names = ("target_logits", "draft_token_ids", "cu_num_draft_tokens", "temperature")
    return (*(arguments.pop(name) for name in names), max(counts, default=0)), arguments


@pytest.mark.parametrize("draft_law", inputs.DRAFT_LAWS)
def test_opcheck_of_verify_chain(draft_law: str) -> None:
    args, kwargs = chain_call(draft_law, [2, 0, 3])
    torch.library.opcheck(verify_chain._op, args, kwargs)


def test_opcheck_of_verify_chain_with_extras() -> None:
    args, kwargs = chain_call("logits", [2, 2])
    del kwargs["seeds"], kwargs["positions"]
    # Every draft is accepted: opcheck takes the NaNs of rows that were not read for a difference.
    kwargs |= {"accept_uniforms": torch.zeros(4), "recovered_uniforms": torch.zeros(2)}
    torch.library.opcheck(verify_chain._op, args, {**kwargs, **EXTRAS})


@pytest.mark.parametrize(
    "options",
    [{}, {"draft_slot": 1}, {"vocab_size": 60, "token_dtype": torch.int32}, {"law_size": 5}],
    ids=str,
)
def test_opcheck_of_sample(options: dict[str, Any]) -> None:
    logits = torch.randn(4, 70, generator=inputs.generator(2))
    keys = {"seeds": torch.arange(4), "positions": torch.arange(4)}
    torch.library.opcheck(sample._op, (logits, torch.ones(4)), {**keys, **options})


@pytest.mark.parametrize("draft_law", inputs.DRAFT_LAWS)
def test_opcheck_of_sample_recovered(draft_law: str) -> None:
    arguments = inputs.chain([1] * 5, 70, draft_law, seed=3)
    args = (arguments["target_logits"][:5], arguments["draft_token_ids"], arguments["temperature"])
    for name in ("target_logits", "draft_token_ids", "temperature", "cu_num_draft_tokens"):
        del arguments[name]
    torch.library.opcheck(sample_recovered._op, args, arguments)
    filters = {"top_k": torch.full((5,), 9), "top_p": torch.full((5,), 0.9), "joint_filters": True}
    of_drafts = {"draft_min_p": torch.full((5,), 0.1)} if draft_law == "logits" else {}
    torch.library.opcheck(sample_recovered._op, args, {**arguments, **filters, **of_drafts})


@pytest.mark.parametrize("vocab_size", [None, 5])
def test_opcheck_of_count_accepted(vocab_size: int | None) -> None:
    torch.library.opcheck(
        count_accepted._op, (torch.tensor([[5, 6, -1], [5, -1, -1]]),), {"vocab_size": vocab_size}
    )


BACKENDS = ["aot_eager", "inductor"]


def compiled(function: Any, backend: str) -> Any:
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, dynamic=True, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_verify_chain_compiles_in_one_graph(backend: str) -> None:
    def step(logits: Tensor, ids: Tensor, cu: Tensor, k: int, **law: Tensor) -> Any:
        out = specdec_ops.verify_chain(
            logits * 1.0, ids, cu, temperature=0.9, max_num_draft_tokens=k, seeds=3, **law, **EXTRAS
        )
        return out, specdec_ops.count_accepted(out.token_ids)

    fast = compiled(step, backend)
    for seed, counts in enumerate([[2, 0, 3], [1, 4], [3, 3, 3, 3]]):
        args, kwargs = chain_call("logits", counts, seed)
        law = {"draft_logits": kwargs["draft_logits"], "positions": kwargs["positions"]}
        got, counted = fast(args[0], args[1], args[2], args[4], **law)
        want, wanted = step(args[0], args[1], args[2], args[4], **law)
        assert margins.all_same_bits(got, want)
        assert margins.all_same_bits(counted, wanted)


@pytest.mark.parametrize("law_size", [None, 8])
@pytest.mark.parametrize("backend", BACKENDS)
def test_sample_compiles_in_one_graph(backend: str, law_size: int | None) -> None:
    def step(logits: Tensor, seeds: Tensor, positions: Tensor) -> Any:
        return specdec_ops.sample(
            logits + 1.0,
            temperature=0.7,
            seeds=seeds,
            positions=positions,
            draft_slot=2,
            law_size=law_size,
        )

    fast = compiled(step, backend)
    for batch, width in [(3, 50), (5, 300), (2, 9)]:
        args = (
            torch.randn(batch, width, generator=inputs.generator(batch)),
            torch.arange(batch),
            torch.arange(batch),
        )
        assert margins.all_same_bits(fast(*args), step(*args))


@pytest.mark.parametrize("backend", BACKENDS)
def test_sample_recovered_compiles_in_one_graph(backend: str) -> None:
    def step(logits: Tensor, ids: Tensor, probs: Tensor, positions: Tensor) -> Any:
        return specdec_ops.sample_recovered(logits, ids, draft_probs=probs, seeds=1, positions=positions)

    fast = compiled(step, backend)
    for batch in (3, 6):
        arguments = inputs.chain([1] * batch, 40, "probs", seed=batch)
        args = (
            arguments["target_logits"][:batch],
            arguments["draft_token_ids"],
            arguments["draft_probs"],
            arguments["positions"],
        )
        assert margins.all_same_bits(fast(*args), step(*args))


def test_fakes_have_the_shapes_of_the_outputs() -> None:
    mode = torch._subclasses.FakeTensorMode()
    for draft_law in inputs.DRAFT_LAWS:
        args, kwargs = chain_call(draft_law, [2, 0, 3])
        real = verify_chain._op(*args, **kwargs, **EXTRAS)
        with mode:
            fake_args = [mode.from_tensor(a) if isinstance(a, Tensor) else a for a in args]
            fake_kwargs = {name: mode.from_tensor(value) for name, value in kwargs.items()}
            fake = verify_chain._op(*fake_args, **fake_kwargs, **EXTRAS)
        for left, right in zip([*real[:3], *real[3]], [*fake[:3], *fake[3]], strict=True):
            assert (left.shape, left.dtype) == (right.shape, right.dtype)
