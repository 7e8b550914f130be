"""The rules of verify_chain and the samplers in Triton, on small shapes: the native kernels' results."""

from __future__ import annotations

import importlib
import itertools
import math
from collections.abc import Iterator
from typing import Any

import implementations
import inputs
import pytest
import specdec_ops
import torch
from implementations import Implementation
from random_chains import EXTRAS
from specdec_ops.rules import Lenience, LossyRule, Margin, Thresholds, TopN, Typical
from test_triton_chain import check

implementations.require_triton()
_chain_arguments = importlib.import_module("specdec_ops.triton._chain_arguments")
#: The package has a function of this name, which hides the module.
warmup = importlib.import_module("specdec_ops.warmup")
NAN, INF = float("nan"), float("inf")


def guess(arguments: inputs.Arguments, which: slice = slice(None)) -> None:
    """Makes drafts the most probable ids of their rows."""
    cu = arguments["cu_num_draft_tokens"].tolist()
    best = arguments["target_logits"].float().nan_to_num(-INF).argmax(-1)
    for r, (begin, end) in enumerate(itertools.pairwise(cu)):
        arguments["draft_token_ids"][begin:end][which] = best[begin + r : end + r][which]


def with_odd_rows(seed: int, draft_law: str = "one_hot") -> inputs.Arguments:
    """A greedy request, rows that hold no law, and ids that are none."""
    arguments = inputs.chain([2, 2, 1, 2, 1], 70, draft_law, seed=seed)
    guess(arguments, slice(0, 1))
    arguments["temperature"][0] = 0.0
    rows, ids = arguments["target_logits"], arguments["draft_token_ids"]
    rows[4, 66], rows[6], rows[7] = NAN, -INF, INF
    ids[4], ids[5], ids[7] = -1, 70, 2
    return arguments


def message_of(op: Any, arguments: inputs.Arguments) -> str:
    with pytest.raises(RuntimeError) as caught:
        op(**arguments)
    return str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        {"rule": "exact"},
        {"rule": "exact_match", "rule_mask": torch.ones(1, dtype=torch.bool)},
        {"rule": "exact_match", "accept_rates": torch.ones(1)},
        {"rule": "exact_match", "fly_window_size": 1},
        {"fly_window_size": 1, "accept_rates": torch.ones(1)},
        {"fly_window_size": 0},
        {"fly_window_size": 1, "fly_entropy_threshold": -0.125},
        {"fly_window_size": 1, "fly_entropy_threshold": NAN},
        {"fly_window_size": 1, "fly_entropy_top_k": 65},
        {"rule": "block", "sampler": "gumbel"},
        {"sampler": "noise"},
        {"sampler": "gumbel"},
        {"rule": "exact_match", "sampler": "gumbel"},
        {"rule": Lenience(1e-7)},
        {"rule": Typical(0.3, 1.5)},
        {"rule": TopN(0)},
        {"rule": Thresholds(NAN)},
        {"rule": Margin(), "rule_mask": torch.ones(2, dtype=torch.bool)},
        {"rule": Margin(), "rule_mask": torch.ones(1)},
    ],
    ids=str,
)
def test_messages_are_the_native_ones(triton: Implementation, options: dict[str, Any]) -> None:
    arguments = inputs.chain([1], 40, "one_hot", seed=1, uniforms=True) | options
    assert message_of(triton.verify_chain, arguments) == message_of(specdec_ops.verify_chain, arguments)


@pytest.mark.parametrize("uniforms", [False, True], ids=["seeds", "uniforms"])
def test_exact_match(triton: Implementation, uniforms: bool) -> None:
    arguments = inputs.chain([2, 0, 1], 4_300, "logits", seed=1, scale=8.0, uniforms=uniforms)
    arguments["rule"] = "exact_match"
    guess(arguments)
    there = specdec_ops.verify_chain(**arguments)
    assert 0 < int(there.num_accepted.sum()) < 3
    check(triton.verify_chain(**arguments), there)


def test_exact_match_over_several_waves_with_given_bonus_tokens(triton: Implementation) -> None:
    arguments = inputs.chain([1, 10], 70, "one_hot", seed=2, scale=99.0)
    guess(arguments)
    arguments["draft_token_ids"][10] = 3
    arguments |= inputs.without_bonus_rows(arguments, torch.tensor([5, 6])) | {"rule": "exact_match"}
    there = specdec_ops.verify_chain(**arguments, **EXTRAS)
    assert there.num_accepted.tolist() == [1, 9]
    check(triton.verify_chain(**arguments, **EXTRAS), there)


def test_exact_match_of_odd_rows(triton: Implementation) -> None:
    for sampler in ("inverse_cdf", "gumbel"):
        arguments = with_odd_rows(3) | {"rule": "exact_match", "sampler": sampler}
        check(triton.verify_chain(**arguments, **EXTRAS), specdec_ops.verify_chain(**arguments, **EXTRAS))


@pytest.mark.parametrize("slots", [None, 2, torch.tensor(1), torch.tensor([3, 0, 0])], ids=str)
def test_tokens_by_noise(triton: Implementation, slots: Any) -> None:
    logits = torch.randn(3, 4_200, generator=inputs.generator(6)).half()
    logits[1] = -INF
    logits[1, 4_150:] = 1.0
    arguments = {
        "temperature": torch.tensor([1.0, 2.0, 0.0]),
        "seeds": torch.tensor([7, -8, 9]),
        "positions": torch.tensor([2**35, 6, 7], dtype=torch.int64),
        "draft_slot": slots,
        "sampler": "gumbel",
    }
    check(triton.sample(logits, **arguments), specdec_ops.sample(logits, **arguments))


def test_noise_of_drafts_is_that_of_their_verification(triton: Implementation) -> None:
    arguments = inputs.chain([3, 1], 300, "one_hot", seed=8) | {"rule": "exact_match", "sampler": "gumbel"}
    rows, owners, slots = [0, 1, 2, 4], [0, 0, 0, 1], torch.tensor([0, 1, 2, 0])
    arguments["draft_token_ids"] = triton.sample(
        arguments["target_logits"][rows],
        **{name: arguments[name][owners] for name in ("temperature", "seeds", "positions")},
        draft_slot=slots,
        sampler="gumbel",
    ).token_ids
    here = triton.verify_chain(**arguments)
    assert here.num_accepted.tolist() == [3, 1]
    check(here, specdec_ops.verify_chain(**arguments))


@pytest.mark.parametrize("rule", ["exact_match", "block"])
def test_without_random_numbers_every_request_is_greedy(triton: Implementation, rule: str) -> None:
    arguments = inputs.chain([1, 2], 40, "logits", seed=9, temperature=0.0)
    guess(arguments, slice(0, 1))
    del arguments["seeds"], arguments["positions"]
    arguments["rule"] = rule
    check(triton.verify_chain(**arguments), specdec_ops.verify_chain(**arguments))
    sampler = {"temperature": 0.0, "sampler": "gumbel"}
    rows = arguments["target_logits"]
    check(triton.sample(rows, **sampler), specdec_ops.sample(rows, **sampler))


def deferring(
    counts: list[int], wrong: list[int], vocab_size: int, likely: list[int], **options: Any
) -> inputs.Arguments:
    """Drafts that the target gives, but for some whose rows have these likely ids."""
    arguments = inputs.chain(counts, vocab_size, "one_hot", seed=len(wrong), scale=0.3)
    rows = arguments["target_logits"]
    rows[:, 7] = 60.0
    guess(arguments)
    cu = arguments["cu_num_draft_tokens"].tolist()
    for draft in wrong:
        r = sum(draft >= end for end in cu[1:])
        arguments["draft_token_ids"][draft] = 3
        rows[draft + r] = 0.0
        rows[draft + r, likely] = 5.0
    return arguments | options


def test_fly(triton: Implementation) -> None:
    # Two deferred drafts, whose windows lie in two waves; windows that fail in the same wave and in the next;
    # one that the drafts are too few for.
    arguments = deferring([12, 5, 9, 6], [1, 6, 13, 15, 22, 25, 27, 31], 70, [40, 41, 50], fly_window_size=3)
    arguments["temperature"] *= torch.tensor([1.0, 0.0, 1.0, 0.0])
    there = specdec_ops.verify_chain(**arguments, **EXTRAS)
    assert there.num_accepted.tolist() == [12, 1, 5, 5]
    check(triton.verify_chain(**arguments, **EXTRAS), there)


@pytest.mark.parametrize("top_k", [1, 3, 6, 64])
def test_entropies_of_fly(triton: Implementation, top_k: int) -> None:
    # Logits that occur in both blocks, and more than once in one.
    likely = [40, 41, 4_500, 4_999]
    arguments = deferring([2], [0], 5_000, likely, fly_window_size=1, fly_entropy_top_k=top_k)
    arguments["target_logits"][0, [39, 4_400]] = 4.0
    law = (arguments["target_logits"][0].double() / float(arguments["temperature"][0])).softmax(-1)
    largest = law.topk(top_k).values
    entropy = float(-(largest * largest.log()).sum())
    for factor, accepted in ((1 - 1e-6, 2), (1 + 1e-6, 0)):
        arguments["fly_entropy_threshold"] = entropy * factor
        there = specdec_ops.verify_chain(**arguments)
        assert there.num_accepted.tolist() == [accepted]
        check(triton.verify_chain(**arguments), there)


def test_laws_of_greedy_requests(triton: Implementation) -> None:
    """Nobody else asks for the sums of their weights."""
    rows = inputs.logits_of([[0.3, 0.2, 0.2, 0.2, 0.1]] * 4)
    arguments = {"target_logits": rows, "draft_token_ids": torch.tensor([1, 1, 0]), "temperature": 0.0}
    arguments["cu_num_draft_tokens"] = torch.tensor([0, 3])
    entropy = -sum(p * math.log(p) for p in (0.3, 0.2, 0.2))
    for options, accepted in (
        ({"rule": TopN(2, 0.11)}, 3),
        ({"rule": TopN(2, 0.09)}, 0),
        ({"fly_window_size": 1, "fly_entropy_threshold": entropy + 1e-4}, 0),
    ):
        there = specdec_ops.verify_chain(**arguments, **options)
        assert there.num_accepted.tolist() == [accepted]
        check(triton.verify_chain(**arguments, **options), there)
    arguments["draft_token_ids"][1] = 0
    options = {"fly_window_size": 1, "fly_entropy_threshold": entropy - 1e-4}
    there = specdec_ops.verify_chain(**arguments, **options)
    assert there.num_accepted.tolist() == [3]
    check(triton.verify_chain(**arguments, **options), there)


@pytest.mark.parametrize("law", ["logits", "support"])
def test_fly_with_draft_laws_and_odd_rows(triton: Implementation, law: str) -> None:
    arguments = with_odd_rows(4, law) | {"fly_window_size": 1, "fly_entropy_threshold": 0.0}
    check(triton.verify_chain(**arguments, **EXTRAS), specdec_ops.verify_chain(**arguments, **EXTRAS))


#: Each with the parameters that its test looks for a change by.
LOSSY_RULES = (Lenience(0.1), Typical(0.2, 0.9), TopN(3, 0.2), Thresholds(0.15, 0.6), Margin(0.9))
lossy_rules = pytest.mark.parametrize("rule", LOSSY_RULES, ids=lambda rule: rule.name)


def with_likely_drafts(counts: list[int], vocab_size: int, draft_law: str, seed: int) -> inputs.Arguments:
    """Drafts that are the first to fourth of their rows, at temperatures that the rules are undecided at."""
    arguments = inputs.chain(counts, vocab_size, draft_law, seed=seed, scale=1.0, noise=0.7)
    arguments["temperature"] = torch.tensor([0.25, 0.4, 0.0, 0.3, 0.0, 0.2])[: len(counts)]
    cu = arguments["cu_num_draft_tokens"].tolist()
    torch.arange(sum(counts)).remainder(4).unsqueeze(1)
    for r, (begin, end) in enumerate(itertools.pairwise(cu)):
        likely = arguments["target_logits"][begin + r : end + r].topk(4).indices
        arguments["draft_token_ids"][begin:end] = likely[
            range(end - begin), [d % 4 for d in range(begin, end)]
        ]
    return arguments


@lossy_rules
@pytest.mark.parametrize("law", ["one_hot", "logits"])
def test_lossy_rules(triton: Implementation, rule: LossyRule, law: str) -> None:
    arguments = with_likely_drafts([4, 3, 3, 1], 70, law, seed=6)
    there = specdec_ops.verify_chain(**arguments, rule=rule)
    plain = specdec_ops.verify_chain(**arguments)
    assert not torch.equal(there.num_accepted, plain.num_accepted)
    check(triton.verify_chain(**arguments, rule=rule), there)


@lossy_rules
def test_lossy_rules_of_rows_of_several_blocks(triton: Implementation, rule: LossyRule) -> None:
    arguments = with_likely_drafts([4], 9_000, "one_hot", seed=5)
    rows, ids = arguments["target_logits"].clamp_(max=2.0), arguments["draft_token_ids"]
    # The second largest in the block of the largest, in another, and as large as that in either.
    rows[0, [3, 4]] = torch.tensor([4.6, 5.0])
    rows[1, [3, 8_999]] = torch.tensor([5.0, 4.9])
    rows[2, [3, 8_191]] = 5.0
    rows[3, [3, 5]] = 5.0
    ids[:] = torch.tensor([3, 8_999, 8_191, 5])
    if rule.name == "margin":
        # Of these drafts token level accepts none.
        arguments["temperature"] = torch.zeros(1)
    there = specdec_ops.verify_chain(**arguments, rule=rule)
    assert rule.name != "margin" or there.num_accepted.tolist() == [4]
    check(triton.verify_chain(**arguments, rule=rule), there)


@pytest.mark.parametrize("law", ["logits", "support"])
def test_lenient_residuals(triton: Implementation, law: str) -> None:
    arguments = inputs.chain([1] * 12, 40, law, seed=2, noise=3.0)
    arguments["rule"] = Lenience(0.6)
    there = specdec_ops.verify_chain(**arguments)
    assert 0 < int(there.num_accepted.sum()) < 8
    check(triton.verify_chain(**arguments), there)


@lossy_rules
def test_lossy_rules_give_way_where_they_are_masked(triton: Implementation, rule: LossyRule) -> None:
    arguments = with_likely_drafts([4, 4, 2], 70, "support", seed=4) | {"rule": rule}
    # Of a stride, as masks made by comparing columns are.
    arguments["rule_mask"] = torch.arange(20).remainder(3)[::2] != 0
    there = specdec_ops.verify_chain(**arguments, **EXTRAS)
    check(triton.verify_chain(**arguments, **EXTRAS), there)


@lossy_rules
def test_lossy_rules_of_odd_rows(triton: Implementation, rule: LossyRule) -> None:
    arguments = with_odd_rows(5, "logits") | {"rule": rule}
    arguments["target_logits"][1, int(arguments["draft_token_ids"][0])] = -INF
    check(triton.verify_chain(**arguments, **EXTRAS), specdec_ops.verify_chain(**arguments, **EXTRAS))


def drafts_of_block_verification(law: str, *, seed: int, uniforms: bool = False) -> inputs.Arguments:
    """Chains near the target's laws, whose last draft is often out of the question."""
    arguments = inputs.chain([2, 3] * 5, 60, law, seed=seed, scale=1.5, noise=1.0, uniforms=uniforms)
    if law == "one_hot":
        arguments["target_logits"] *= 3.0
        guess(arguments)
    for r, end in enumerate(arguments["cu_num_draft_tokens"][1:].tolist()):
        if r % 3 > 0:
            arguments["target_logits"][end - 1 + r, int(arguments["draft_token_ids"][end - 1])] -= 30.0
    return arguments | {"rule": "block"}


@pytest.mark.parametrize(
    "law", ["one_hot", "logits", "logits_and_logsumexp, uniforms", "probs, uniforms", "support"]
)
def test_block_verification(triton: Implementation, law: str) -> None:
    law, _, uniforms = law.partition(", ")
    arguments = drafts_of_block_verification(law, seed=3, uniforms=bool(uniforms))
    there = specdec_ops.verify_chain(**arguments)
    assert len(set(there.num_accepted.tolist())) >= 3
    check(triton.verify_chain(**arguments), there)


@pytest.mark.parametrize("law", ["logits", "support"])
def test_block_verification_of_odd_rows(triton: Implementation, law: str) -> None:
    arguments = with_odd_rows(6, law) | {"rule": "block"}
    if law == "logits":
        # No usable laws: of the first draft, and of one behind it.
        arguments["draft_logits"][[2, 6]] = NAN
    check(triton.verify_chain(**arguments, **EXTRAS), specdec_ops.verify_chain(**arguments, **EXTRAS))


def test_block_verification_of_chains_longer_than_a_wave(triton: Implementation) -> None:
    arguments = inputs.chain([11, 9], 70, "probs", seed=2, noise=0.05)
    arguments["draft_token_ids"][19] = 70
    arguments |= inputs.without_bonus_rows(arguments, torch.tensor([5, 6])) | {"rule": "block"}
    there = specdec_ops.verify_chain(**arguments, **EXTRAS)
    assert min(there.num_accepted.tolist()) >= 8
    check(triton.verify_chain(**arguments, **EXTRAS), there)


@pytest.mark.parametrize("uniforms", [False, True], ids=["seeds", "uniforms"])
def test_block_verification_where_attempts_find_nothing(triton: Implementation, uniforms: bool) -> None:
    """The first draft has a chance of 1, and the second the same law in both: Z is 0, and h is 0 / 0."""
    arguments = inputs.chain([2, 2], 90, "logits", seed=4, temperature=0.7, uniforms=uniforms)
    arguments["target_logits"][[1, 4]] = arguments["draft_logits"][[1, 3]]
    arguments["draft_logits"][[0, 2]] = arguments["target_logits"][[0, 3]]
    for draft, row in ((1, 1), (3, 4)):
        # Its chance is made 0 without a change of the law that the slot before looks at.
        arguments["draft_token_ids"][draft] = int(arguments["target_logits"][row].argmin())
        arguments["target_logits"][row, arguments["draft_token_ids"][draft]] = -INF
        arguments["draft_logits"][draft, arguments["draft_token_ids"][draft]] = -90.0
    arguments["rule"] = "block"
    there = specdec_ops.verify_chain(**arguments)
    assert there.num_accepted.tolist() == [1, 1]
    check(triton.verify_chain(**arguments), there)


def test_ids_that_a_sparse_law_lists_twice(triton: Implementation) -> None:
    arguments = inputs.chain([2], 60, "support", seed=5, noise=1.0, temperature=1.0, uniforms=True)
    ids, logprobs = arguments["draft_support_ids"], arguments["draft_support_logprobs"]
    # More of them than are looked at at once; together as much as before.
    arguments["draft_support_ids"] = torch.cat([ids, ids.flip(1), ids - 60, ids, ids], 1)
    arguments["draft_support_logprobs"] = torch.cat(
        [logprobs, logprobs.flip(1), logprobs, logprobs, logprobs], 1
    ).sub(math.log(4))
    p = arguments["target_logits"][:2].double().softmax(-1)
    q = torch.zeros(2, 60, dtype=torch.float64).scatter(1, ids, logprobs.double().exp())
    x = arguments["draft_token_ids"].tolist()
    # Drafts whose chances are 0.6 of each before.
    first, second = (0.6 * float(q[i, x[i]] / p[i, x[i]]) for i in range(2))
    assert max(first, second) < 100
    for i, factor in enumerate((first, second)):
        own = p[i, x[i]] * factor
        p[i] *= (1 - own) / (1 - p[i, x[i]])
        p[i, x[i]] = own
    arguments["target_logits"][:2] = p.log()
    chance = float(p[0, x[0]] / q[0, x[0]])
    z = float((chance * p[1] - q[1]).clamp(min=0).sum())
    h = z / (z + 1 - chance)
    arguments["rule"] = "block"
    for coin, accepted in ((h * (1 - 1e-5), 1), (h * (1 + 1e-5), 0)):
        arguments["accept_uniforms"] = torch.tensor([coin, 0.999], dtype=torch.float64)
        there = specdec_ops.verify_chain(**arguments)
        assert there.num_accepted.tolist() == [accepted]
        check(triton.verify_chain(**arguments), there)


RULES_OF_CUT_ROWS: dict[str, dict[str, Any]] = {
    "exact_match": {"rule": "exact_match"},
    "gumbel": {"rule": "exact_match", "sampler": "gumbel"},
    "fly": {"fly_window_size": 1, "fly_entropy_threshold": 0.1, "fly_entropy_top_k": 9},
    "block": {"rule": "block"},
    **{rule.name: {"rule": rule} for rule in LOSSY_RULES},
}


@pytest.mark.parametrize("rule", RULES_OF_CUT_ROWS)
def test_rules_of_rows_that_are_cut(triton: Implementation, rule: str) -> None:
    arguments = inputs.chain([2, 1], 40, "logits", seed=8, noise=0.5) | RULES_OF_CUT_ROWS[rule]
    arguments |= {"top_k": torch.tensor([6, 40]), "top_p": torch.tensor([0.9, 0.7]), "draft_top_k": 7}
    there = specdec_ops.verify_chain(**arguments, **EXTRAS)
    whole = {name: value for name, value in arguments.items() if "top" not in name or "entropy" in name}
    assert not torch.equal(there.logprobs, specdec_ops.verify_chain(**whole, **EXTRAS).logprobs)
    check(triton.verify_chain(**arguments, **EXTRAS), there)


RULES = ("token", "synthetic", "fly", "block", "exact_match", "lossy")


class TestWarmup:
    """Which kernels a call would launch; none is, so that nothing is compiled."""

    @pytest.fixture
    def launched(self, monkeypatch: pytest.MonkeyPatch) -> set[tuple[Any, ...]]:
        keys: set[tuple[Any, ...]] = set()

        def note(
            jitted: Any, num_programs: int, beside: Any, args: Any, constants: Any, options: dict[str, Any]
        ) -> None:
            if num_programs > 0:
                keys.add((jitted.fn.__name__, *map(str, constants), *options.items()))

        monkeypatch.setattr(_chain_arguments, "launch_prepared", note)
        return keys

    @staticmethod
    def calls(op: Any, rule: str, batch: int) -> Iterator[dict[str, Any]]:
        """What ``rule`` may be asked for, one optional argument at a time."""
        made_up = warmup._Inputs(
            torch.device("cpu"), (batch, 3, 50), torch.bfloat16, torch.int64, with_options=True
        )
        calls = warmup._OPS_ON_ROWS[op](made_up, (rule,))
        for call in calls:
            is_lossy = isinstance(call.get("rule"), Typical)
            yield from ({**call, "rule": each} for each in LOSSY_RULES) if is_lossy else (call,)

    @pytest.mark.parametrize("rule", RULES)
    def test_what_a_rule_needs_is_compiled(
        self, triton: Implementation, launched: set[tuple[Any, ...]], rule: str
    ) -> None:
        sizes, device = (2, 3, 50), torch.device("cpu")
        for op in (specdec_ops.verify_chain, specdec_ops.sample):
            here = getattr(triton, op.__name__)
            for call in warmup._calls(op, device, sizes, (torch.bfloat16,), (rule,)):
                if "law_size" not in call:
                    here(**call)
            compiled = set(launched)
            for call in self.calls(op, rule, 3):
                if "law_size" not in call:
                    here(**call)
            assert launched == compiled
            launched.clear()

    def test_each_rule_has_kernels_of_its_own(
        self, triton: Implementation, launched: set[tuple[Any, ...]]
    ) -> None:
        names = {
            "fly": {"find_entropies"},
            "block": {"walk_chains"},
            "exact_match": {"draw_tokens", "score_blocks"},
            "lossy": {"ask_blocks"},
        }
        for rule in RULES:
            launched.clear()
            for call in self.calls(specdec_ops.verify_chain, rule, 2):
                triton.verify_chain(**call)
            assert {key[0] for key in launched} == {"read_rows", "judge_requests"} | names.get(rule, set())
            # Draft laws that make no difference are left alone.
            kinds_of_laws = {key[3] for key in launched if key[0] == "judge_requests"}
            assert len(kinds_of_laws) == (1 if rule == "exact_match" else 4)
