"""What Triton makes of rows, on small shapes: the native kernels' numbers, where no GPU is."""

from __future__ import annotations

from typing import Any

import inputs
import pytest
import specdec_ops
import torch
from implementations import Implementation

NAN, INF = float("nan"), float("inf")


def check(here: Any, there: Any) -> None:
    """Equal integers; floats as near as weights are that the interpreter, which has no fma, rounds twice."""
    for name, a, b in zip(there._fields, here, there, strict=True):
        if b is None or not b.is_floating_point():
            assert (a is None) == (b is None) and (b is None or torch.equal(a, b)), (name, a, b)
            continue
        torch.testing.assert_close(a, b, rtol=4e-7, atol=4e-7, equal_nan=True, msg=f"{name}: {a}, {b}")


class TestRowStatistics:
    def pair(self, num_rows: int, vocab_size: int, noise: float) -> tuple[torch.Tensor, torch.Tensor]:
        draw = inputs.generator(1)
        target = 3 * torch.randn(num_rows, vocab_size, generator=draw)
        return target, target + noise * torch.randn(num_rows, vocab_size, generator=draw)

    @pytest.mark.parametrize(("gap", "offset"), [(0, 0), (3, 1)], ids=["aligned", "not aligned"])
    def test_pairs_of_different_dtypes(self, triton: Implementation, gap: int, offset: int) -> None:
        target, draft = self.pair(3, 4_300, 1.0)
        arguments: dict[str, Any] = {
            "logits": inputs.strided(target.bfloat16(), gap, offset, NAN),
            "temperature": torch.tensor([0.8, 0.0, 2.0]),
            "draft_logits": inputs.strided(draft, offset, gap, NAN),
            "draft_temperature": torch.stack([torch.tensor([1.1, 0.9, 1.3])] * 2, dim=1)[:, 0],
        }
        check(triton.row_statistics(**arguments), specdec_ops.row_statistics(**arguments))

    def test_equal_rows(self, triton: Implementation) -> None:
        target, _ = self.pair(2, 4_200, 0.0)
        out = triton.row_statistics(target, draft_logits=target)
        assert out.total_variation.tolist() == [0.0, 0.0]
        assert bool(((out.accept_prob > 1 - 1e-6) & (out.accept_prob <= 1)).all())

    def test_indices_that_nobody_checked_are_no_rows(self, triton: Implementation) -> None:
        target, draft = self.pair(3, 40, 1.0)
        out = triton.row_statistics(target, draft_logits=draft, row_indices=torch.tensor([2, 3, -(2**40)]))
        same = specdec_ops.row_statistics(target, draft_logits=draft, row_indices=torch.tensor([2, -1, -1]))
        check(out, same)

    def test_logsumexp_is_that_of_sample(self, triton: Implementation) -> None:
        target, _ = self.pair(2, 4_100, 0.0)
        t = torch.tensor([0.7, 0.0])
        sampled = triton.sample(target, temperature=t, seeds=1, positions=torch.arange(2))
        assert torch.equal(triton.row_statistics(target, temperature=t).logsumexp, sampled.logsumexp)

    def test_a_tie_of_two_blocks(self, triton: Implementation) -> None:
        target = torch.zeros(1, 4_200)
        target[0, 17], target[0, 4_150] = 2.0, 2.0
        assert triton.row_statistics(target).margin.tolist() == [0.0]

    def test_a_greedy_draft_of_a_row_of_nan_is_the_first_id(self, triton: Implementation) -> None:
        """What pads the row is no id."""
        rows = {"logits": torch.tensor([[2.0, 1.0, 0.0, 9.0]]), "draft_logits": torch.full((1, 4), NAN)}
        options = {"draft_temperature": torch.zeros(1), "vocab_size": 3}
        check(triton.row_statistics(**rows, **options), specdec_ops.row_statistics(**rows, **options))


class TestTokenLogprobs:
    def rows(self, num_rows: int, vocab_size: int) -> torch.Tensor:
        """With many ties."""
        rows = 3 * torch.randn(num_rows, vocab_size, generator=inputs.generator(2))
        return rows.mul(2).round().div(2).clamp(max=7.0)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
    def test_rows_that_are_not_aligned(self, triton: Implementation, dtype: torch.dtype) -> None:
        arguments: dict[str, Any] = {
            "logits": inputs.strided(self.rows(2, 4_300).to(dtype), 3, 1, NAN),
            "token_ids": torch.tensor([[7, 4_299], [-9, -9]]).t()[:, 0],
            "temperature": torch.tensor([0.7, 0.0]),
        }
        for top_n in (1, 64):
            check(
                triton.token_logprobs(**arguments, top_n=top_n),
                specdec_ops.token_logprobs(**arguments, top_n=top_n),
            )

    def test_a_list_of_a_row_with_more_blocks_than_it_may_have_ids(self, triton: Implementation) -> None:
        logits = torch.full((1, 64 * 4_096 + 100), -INF, dtype=torch.bfloat16)
        logits[0, [63 * 4_096, 64 * 4_096 + 70]] = torch.tensor([2.0, 3.0], dtype=torch.bfloat16)
        # A block of nothing but NaN comes last.
        logits[0, :4_096] = NAN
        out = triton.token_logprobs(logits, torch.tensor([9]), top_n=3)
        assert out.token_ids.tolist() == [[9, 64 * 4_096 + 70, 63 * 4_096, 4_096]]

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
    def test_digits_of_each_dtype(self, triton: Implementation, dtype: torch.dtype) -> None:
        """Neighbours of either sign, and zeros."""
        values = torch.tensor([1.0, -1.0, 1e-4, -1e-4, 60_000.0, -60_000.0], dtype=dtype)
        inf = torch.tensor(INF, dtype=dtype)
        values = torch.cat([values, values.nextafter(inf), values.nextafter(-inf), 0 * values])[None]
        for logits in (values, values.flip(1)):
            out = triton.token_logprobs(logits, torch.tensor([0]), top_n=24)
            assert out.token_ids[0, 1:].equal(logits[0].argsort(descending=True, stable=True))

    def test_totals_that_nobody_checked_stay_inside_the_tensors(self, triton: Implementation) -> None:
        """Clamped to drafts 0 to 3, 3 to 3 and 0 to 1, which are more tokens than there are rows."""
        ids, cu = torch.arange(15).reshape(3, 5), torch.tensor([99, 0, 1])
        out = triton.token_logprobs(self.rows(6, 20), ids, cu_num_draft_tokens=cu)
        assert out.cu_num_tokens.tolist() == [0, 4, 5, 6]
        assert out.token_ids[:, 0].tolist() == [0, 1, 2, 3, 5, 10]


class TestLawsOfTheLikeliestIds:
    def arguments(self, num_rows: int, vocab_size: int) -> dict[str, Any]:
        logits = 3 * torch.randn(num_rows, vocab_size, generator=inputs.generator(3))
        return {
            "logits": logits.mul(4).round().div(4),
            "temperature": torch.full((num_rows,), 0.8),
            "law_size": 20,
        }

    @pytest.mark.parametrize("source", ["target", "draft slot", "draft slots", "uniforms"])
    def test_numbers_of_every_source(self, triton: Implementation, source: str) -> None:
        arguments = self.arguments(2, 4_300)
        arguments["logits"] = inputs.strided(arguments["logits"], 3, 1, NAN)
        keys = {"seeds": torch.tensor([5, 6]), "positions": torch.tensor([2**40, 2])}
        drawn: dict[str, Any] = {
            "target": keys,
            "draft slot": keys | {"draft_slot": 2},
            "draft slots": keys | {"draft_slot": torch.tensor([3, 1])},
            "uniforms": {"uniforms": torch.tensor([0.4, 1 - 2.0**-53], dtype=torch.float64)},
        }[source]
        check(triton.sample(**arguments, **drawn), specdec_ops.sample(**arguments, **drawn))

    def test_entries_and_rows_without_a_draw(self, triton: Implementation) -> None:
        arguments = self.arguments(5, 200)
        logits = arguments["logits"]
        logits[0, 10:], logits[1, 70:], logits[3, 150], logits[4] = -INF, -INF, NAN, -INF
        arguments["temperature"] = torch.tensor([0.8, 0.0, 1.0])
        arguments["token_dtype"] = torch.int32
        keys = {"seeds": torch.tensor([5, 6, 7]), "positions": torch.arange(5)}
        given = {"request_indices": torch.tensor([2, 1, -1, 0, 2])}
        check(triton.sample(**arguments, **keys, **given), specdec_ops.sample(**arguments, **keys, **given))
        # Nobody has checked indices: the last entry, and no request.
        held = {"request_indices": torch.tensor([99, 1, -7, 0, 2])}
        check(triton.sample(**arguments, **keys, **held), specdec_ops.sample(**arguments, **keys, **given))

    @pytest.mark.parametrize("order", ["sequential", "joint"])
    def test_filters_with_it(self, triton: Implementation, order: str) -> None:
        """Of entries that are given: cut by filters, by size, by neither, greedy, and without a law."""
        arguments = self.arguments(6, 4_300)
        logits = arguments["logits"]
        logits[4, 30], logits[5, 4_250] = -INF, NAN
        arguments |= {
            "temperature": torch.tensor([0.8, 0.0, 1.3, 0.5]),
            "request_indices": torch.tensor([0, 1, 2, 3, -1, 0]),
            "seeds": torch.arange(4),
            "positions": torch.arange(6),
            "top_k": torch.tensor([7, 3, 0, 90]),
            "top_p": torch.tensor([0.7, 0.5, 1.0, 0.9]),
            "min_p": torch.tensor([0.0, 0.3, 0.0, 0.05]),
            "filter_order": order,
        }
        here = triton.sample(**arguments)
        check(here, specdec_ops.sample(**arguments))
        assert here.support_ids is not None
        counts = (here.support_ids >= 0).sum(1).tolist()
        assert 1 < counts[0] <= 7 and counts[1] == counts[4] == counts[5] == 1 and counts[2] == 20
