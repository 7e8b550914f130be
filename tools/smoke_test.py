"""A quick check of the installed package with nothing but torch and numpy: does every op work here?

Run by any Python with the wheel installed; no compiler, no pytest.
"""

from __future__ import annotations

import doctest
import sys

import specdec_ops
import torch


def check_examples() -> None:
    """The example of every public function's docstring."""
    finder, runner = doctest.DocTestFinder(recurse=False), doctest.DocTestRunner()
    for name in specdec_ops.__all__:
        for test in finder.find(getattr(specdec_ops, name), name):
            runner.run(test)
    result = runner.summarize()
    assert result.failed == 0 and result.attempted > 0, result


def check_against_reference() -> None:
    """Native kernels against the reference, on a batch with drafts of every length."""
    torch.manual_seed(0)
    counts = torch.tensor([0, 1, 2, 3, 7, 0, 4])
    cu = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    num_drafts, batch, vocab = int(cu[-1]), len(counts), 1031
    arguments = {
        "target_logits": torch.randn(num_drafts + batch, vocab) * 3,
        "draft_token_ids": torch.randint(vocab, (num_drafts,)),
        "cu_num_draft_tokens": cu,
        "draft_logits": torch.randn(num_drafts, vocab) * 3,
        "temperature": torch.tensor([1.0, 0.5, 0.0, 1.3, 1.0, 0.0, 0.8]),
        "seeds": torch.arange(batch),
        "positions": torch.arange(batch) * 100,
    }
    out = specdec_ops.verify_chain(**arguments)
    # The meta key has the fake and every other key the reference: ask for it as another device would.
    reference = sys.modules["specdec_ops.ops.verify_chain"]._reference_verify_chain
    arguments["max_num_draft_tokens"] = int(counts.max())
    expected = reference(**arguments)
    torch.testing.assert_close(out.token_ids, expected[0], rtol=0, atol=0)
    torch.testing.assert_close(out.num_accepted, expected[1], rtol=0, atol=0)
    drawn = specdec_ops.sample(
        arguments["target_logits"], seeds=7, positions=torch.arange(num_drafts + batch)
    )
    assert drawn.token_ids.shape == (num_drafts + batch,)
    assert bool((drawn.logprobs <= 0).all())


def check_compile() -> None:
    """Traced by torch.compile without a break, for any shape."""

    def count(ids: torch.Tensor) -> torch.Tensor:
        return specdec_ops.count_accepted(ids).num_accepted + 1

    compiled = torch.compile(count, backend="eager", fullgraph=True, dynamic=True)
    ids = torch.tensor([[3, 4, -1], [5, -1, -1]])
    assert compiled(ids).tolist() == [2, 1]


def main() -> None:
    print(specdec_ops.show_config())
    assert "native" in specdec_ops.show_config(), "the native module is missing"
    for check in (check_examples, check_against_reference, check_compile):
        check()
        print(f"{check.__name__}: ok")


if __name__ == "__main__":
    main()
