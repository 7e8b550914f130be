"""The sampling with the calling conventions of vLLM's newer runner, without vLLM, on CPU and GPU.

It is compared with ``verify_chain`` and ``sample`` called for one request at a time; in tests_vllm with
vLLM's kernels.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import chi_square
import numpy as np
import pytest
import specdec_ops
import torch
from specdec_ops.integrations.vllm import _report, runner_sampling
from torch import Tensor

SEEDS = range(40)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NUM_SLOTS = 11
WIDTH = 67
#: A chi-square test alarms below this.
ALARM = 1e-4

Call = tuple[tuple[Any, ...], dict[str, Any]]


@pytest.fixture(params=["cpu", *(["cuda"] if torch.cuda.is_available() else [])])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def handed_over() -> list[Call]:
    return []


@pytest.fixture
def rejection_sample(handed_over: list[Call]) -> Callable[..., Any]:
    return runner_sampling.make_rejection_sample(noting(handed_over))


@pytest.fixture
def gumbel_sample(handed_over: list[Call]) -> Callable[..., Any]:
    return runner_sampling.make_gumbel_sample(noting(handed_over))


def noting(calls: list[Call]) -> Callable[..., str]:
    """The engine's own function: it notes its calls."""

    def stock(*args: Any, **kwargs: Any) -> str:
        calls.append((args, kwargs))
        return "stock"

    return stock


@pytest.fixture(autouse=True)
def fresh_report() -> Iterator[None]:
    _report.calls.clear()
    _report.handed_over.clear()
    yield
    _report.calls.clear()
    _report.handed_over.clear()


class Step:
    """A random step of a runner, and the arguments for its verification."""

    def __init__(self, seed: int, device: str, *, alike: bool = False, drafted: bool = True) -> None:
        rng = random.Random(seed)
        self.k, self.size = rng.randint(1, 4), rng.randint(1, 8)
        self.counts = [self.k if alike else rng.randint(0, self.k) for _ in range(self.size)]
        self.slots = rng.sample(range(NUM_SLOTS), self.size)
        self.first_rows = [sum(self.counts[:r]) + r for r in range(self.size)]
        generator = torch.Generator().manual_seed(seed)
        num_rows = sum(self.counts) + self.size
        dtype, draft_dtype = rng.choice(DTYPES), rng.choice(DTYPES)
        # Rows lie apart, and either vocabulary may be the wider one.
        width, draft_width = WIDTH + rng.choice([0, 2]), WIDTH + rng.choice([0, 3])
        target = (2 * torch.randn(num_rows, width + 5, generator=generator)).to(dtype)[:, :width]
        cache = torch.randn(NUM_SLOTS, self.k + rng.choice([0, 1]), draft_width + 3, generator=generator)
        self.vocab_size = min(width, draft_width) if drafted else width
        sampled = torch.randint(0, WIDTH, (num_rows,), generator=generator)
        for r in range(self.size):
            for row in range(self.first_rows[r] + 1, self.first_rows[r] + self.counts[r] + 1):
                # Half of the drafts are likely ones.
                if rng.random() < 0.5:
                    sampled[row] = int(target[row - 1, :WIDTH].argmax())
                if rng.random() < 0.15:
                    sampled[row] = -1
        local = torch.cat([torch.arange(count + 1) for count in self.counts]).int()
        repeats = torch.tensor(self.counts) + 1
        index_dtype = rng.choice([torch.int32, torch.int64])
        idx_mapping = torch.tensor(self.slots, dtype=index_dtype)
        self.arguments: dict[str, Any] = {
            "target_logits": target,
            "draft_logits": (1.5 * cache).to(draft_dtype)[..., :draft_width] if drafted else None,
            "draft_sampled": sampled.to(rng.choice([torch.int32, torch.int64])),
            "cu_num_logits": torch.tensor([*self.first_rows, num_rows], dtype=torch.int32),
            "pos": torch.randint(0, 1000, (self.size,), generator=generator).repeat_interleave(repeats)
            + local,
            "idx_mapping": idx_mapping,
            "expanded_idx_mapping": idx_mapping.repeat_interleave(repeats),
            "expanded_local_pos": local,
            "temperature": torch.tensor([rng.choice([0.0, 0.6, 1.0, 1.7]) for _ in range(NUM_SLOTS)]),
            "seed": torch.randint(-(2**62), 2**62, (NUM_SLOTS,), generator=generator),
        }
        self.arguments = {
            name: value.to(device) if isinstance(value, Tensor) else value
            for name, value in self.arguments.items()
        }
        self.arguments["num_speculative_steps"] = self.k

    def alone(self, r: int, **rule: Any) -> specdec_ops.VerifyChainOutput:
        """What ``verify_chain`` makes of request r by itself."""
        given, slot = self.arguments, self.slots[r]
        begin, end = self.first_rows[r], self.first_rows[r] + self.counts[r] + 1
        temperature = float(given["temperature"][slot])
        cache = given["draft_logits"]
        return specdec_ops.verify_chain(
            given["target_logits"][begin:end, : self.vocab_size],
            given["draft_sampled"][begin + 1 : end],
            torch.tensor([0, self.counts[r]], device=given["seed"].device),
            draft_temperature=temperature,
            draft_logits=None if cache is None else cache[slot, : self.counts[r], : self.vocab_size],
            seeds=int(given["seed"][slot]),
            positions=given["pos"][begin : begin + 1],
            max_num_draft_tokens=self.k,
            **{"temperature": 1.0 if temperature > 0 else 0.0, **rule},
        )


def check(step: Step, output: tuple[Tensor, Tensor], **rule: Any) -> list[int]:
    """Each request has the tokens that it has alone; returns how many each has."""
    sampled, num_sampled = output
    assert (sampled.dtype, num_sampled.dtype) == (torch.int64, torch.int32)
    assert sampled.shape == (step.size, step.k + 1)
    for r in range(step.size):
        want = step.alone(r, **rule)
        assert num_sampled[r] == want.num_accepted[0] + 1
        assert sampled[r].tolist() == want.token_ids[0].tolist()
    return num_sampled.tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("drafted", [True, False], ids=["draft law", "no law"])
@pytest.mark.parametrize("alike", [True, False], ids=["as many drafts", "ragged"])
def test_requests_get_what_verify_chain_gives_them(
    device: str, rejection_sample: Any, handed_over: list[Call], alike: bool, drafted: bool
) -> None:
    lengths = []
    for seed in SEEDS:
        step = Step(seed, device, alike=alike, drafted=drafted)
        lengths += check(step, rejection_sample(**step.arguments))
    assert len(set(lengths)) >= 3 and not handed_over
    assert _report.calls["rejection_sample (V2)"] == len(SEEDS)


@pytest.mark.parametrize("rate", [0.0, 0.5, 1.0])
def test_synthetic_rates(device: str, rejection_sample: Any, rate: float) -> None:
    for seed in SEEDS:
        step = Step(seed, device)
        rates = torch.full((step.k,), rate, device=device)
        lengths = check(
            step, rejection_sample(**step.arguments, synthetic_conditional_rates=rates), accept_rates=rates
        )
        if rate == 0.0:
            assert set(lengths) == {1}


def test_fly(device: str, rejection_sample: Any) -> None:
    more = 0
    for seed in SEEDS:
        step = Step(seed, device, alike=True)
        rule = {"fly_window_size": 1, "fly_entropy_threshold": 0.2, "fly_entropy_top_k": 4}
        lengths = check(step, rejection_sample(**step.arguments, **rule), **rule)
        more += sum(lengths) - int(rejection_sample(**step.arguments, fly_window_size=0)[1].sum())
    assert more > 0


@pytest.mark.parametrize("drafted", [True, False], ids=["draft law", "no law"])
@pytest.mark.parametrize("alike", [True, False], ids=["as many drafts", "ragged"])
def test_block_verification(
    device: str, rejection_sample: Any, handed_over: list[Call], alike: bool, drafted: bool
) -> None:
    more = 0
    for seed in SEEDS:
        step = Step(seed, device, alike=alike, drafted=drafted)
        output = rejection_sample(**step.arguments, use_block_verification=True)
        check(step, output, rule="block")
        more += int(not torch.equal(output[0], rejection_sample(**step.arguments)[0]))
    assert more > 0 and not handed_over


def test_greedy_tokens_are_argmaxes(device: str, rejection_sample: Any) -> None:
    for seed in SEEDS:
        step = Step(seed, device)
        step.arguments["temperature"].zero_()
        sampled, num_sampled = rejection_sample(**step.arguments)
        best = step.arguments["target_logits"][:, : step.vocab_size].argmax(-1)
        for r, first in enumerate(step.first_rows):
            drafts = step.arguments["draft_sampled"][first + 1 : first + 1 + step.counts[r]].tolist()
            rows = best[first : first + step.counts[r] + 1].tolist()
            n = next((i for i, (x, y) in enumerate(zip(drafts, rows, strict=False)) if x != y), len(drafts))
            assert sampled[r, : int(num_sampled[r])].tolist() == rows[: n + 1]


@pytest.mark.parametrize(
    ("feature", "asked"),
    [
        ("watermarks", {"contexts": 1, "watermarking": 2, "watermark_key": 3, "watermarking_skip_mask": 4}),
        ("Gumbel noise in float64", {"use_fp64": True}),
        ("FLy entropy of more than 64 ids", {"fly_window_size": 2, "fly_entropy_top_k": 65}),
    ],
)
def test_the_engine_verifies_what_is_not_there(
    rejection_sample: Any, handed_over: list[Call], feature: str, asked: dict[str, Any]
) -> None:
    step = Step(0, "cpu")
    assert rejection_sample(**step.arguments, **asked) == "stock"
    ((args, kwargs),) = handed_over
    names = list(inspect.signature(rejection_sample).parameters)
    got = dict(zip(names, args, strict=False)) | kwargs
    for name, value in {**step.arguments, **asked}.items():
        assert got[name] is value or got[name] == value
    assert _report.handed_over == {feature: 1}
    assert "fly_window_size" in got or feature[:3] != "FLy"
    assert ("fly_window_size" in got) == ("fly_window_size" in asked), "0.32 has no FLy"


class Processor:
    """A logits processor of the engine: adds to the logits of one id, in the rows of requests that ask."""

    def __init__(self, asked: Sequence[int] = ()) -> None:
        self.asked = np.isin(np.arange(NUM_SLOTS), asked)
        self.use_penalty = self.use_logit_bias = self.asked
        self.num_bad_words = SimpleNamespace(np=self.asked.astype(np.int32))

    def apply(self, logits: Tensor, context: SimpleNamespace) -> Tensor:
        assert logits.dtype == torch.float32
        rows = torch.from_numpy(self.asked).to(logits.device)[context.expanded_idx_mapping.long()]
        logits[:, 3] += 2.0 * rows
        return logits


class PenaltiesState(Processor): ...


class LogitBiasState(Processor): ...


class BadWordsState(Processor): ...


class Custom(Processor): ...


PROCESSORS = (PenaltiesState, LogitBiasState, BadWordsState, Custom)


class ThinkingBudgetState(Processor):
    @property
    def enabled(self) -> bool:
        return bool(self.asked.any())

    @property
    def use_thinking_budget(self) -> Any:
        return self.asked


class FilteredStep(Step):
    """A step whose requests have filters, and the samplers of the engine that hold them."""

    def __init__(self, seed: int, device: str, *, asked: Sequence[type] = (), **more: Any) -> None:
        super().__init__(seed, device, **more)
        self.rng = rng = random.Random(seed)
        width = self.arguments["target_logits"].shape[1]
        self.filters = [
            {
                "top_k": rng.choice([width, rng.randint(1, 20)]),
                "top_p": rng.choice([1.0, rng.uniform(0.1, 1.0)]),
                "min_p": rng.choice([0.0, rng.uniform(0.0, 0.5)]),
            }
            for _ in range(NUM_SLOTS)
        ]
        self.asked = self.slots[::2] if asked else []
        states = SimpleNamespace(
            vocab_size=width,
            num_logprobs=np.full(NUM_SLOTS, -1),
            temperature=self.kept("temperature"),
            seeds=self.kept("seed"),
        )
        for name, dtype in (("top_k", torch.int32), ("top_p", torch.float32), ("min_p", torch.float32)):
            values = torch.tensor([each[name] for each in self.filters], dtype=dtype)
            setattr(states, name, SimpleNamespace(np=values.numpy(), gpu=values.to(device)))
        self.sampler = SimpleNamespace(
            sampling_states=states,
            needs_logits_processing=np.ones(NUM_SLOTS, dtype=bool),
            logprobs_mode="raw_logprobs",
            return_sampling_mask=False,
            use_fp64_gumbel=False,
            logits_processors=[
                each(self.asked if each in asked else ()) for each in PROCESSORS[: 3 + (Custom in asked)]
            ],
            thinking_budget_state=ThinkingBudgetState(self.asked if ThinkingBudgetState in asked else ()),
        )
        self.verifier = SimpleNamespace(
            sampler=self.sampler,
            watermark_key=None,
            num_speculative_steps=self.k,
            use_block_verification=False,
            synthetic_conditional_rates=None,
        )

    def kept(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(gpu=self.arguments[name], np=self.arguments[name].cpu().numpy())

    def verify(self, verify: Callable[..., Any], logits: Tensor | None = None) -> Any:
        given = self.arguments
        return verify(
            self.verifier,
            given["target_logits"] if logits is None else logits,
            given["draft_logits"],
            torch.zeros_like(given["draft_sampled"]),
            given["pos"],
            given["cu_num_logits"],
            given["idx_mapping"],
            given["idx_mapping"].cpu().numpy(),
            given["expanded_idx_mapping"],
            given["expanded_local_pos"],
            None,
            given["draft_sampled"],
        )

    def rows(self) -> Tensor:
        """What the laws are of."""
        logits = self.arguments["target_logits"]
        if not self.asked:
            return logits
        logits = logits.to(torch.float32, copy=True)
        asked = torch.tensor([int(slot) in self.asked for slot in self.arguments["expanded_idx_mapping"]])
        logits[:, 3] += 2.0 * asked.to(logits.device)
        return logits

    def alone(self, r: int, **rule: Any) -> specdec_ops.VerifyChainOutput:
        temperature = float(self.arguments["temperature"][self.slots[r]])
        unscaled = {"temperature": temperature, **self.filters[self.slots[r]]}
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(self.arguments, "target_logits", self.rows())
            return super().alone(r, **unscaled, **rule)


@pytest.fixture
def verify(handed_over: list[Call]) -> Callable[..., Any]:
    return runner_sampling.make_verify(noting(handed_over), SimpleNamespace, SimpleNamespace)


@pytest.mark.parametrize("rule", ["token", "block", "synthetic", "FLy"])
def test_filters_go_to_verify_chain(device: str, verify: Any, handed_over: list[Call], rule: str) -> None:
    """No copy is made of the logits, in any dtype."""
    for seed in SEEDS:
        step = FilteredStep(seed, device, drafted=seed % 3 > 0)
        arguments: dict[str, Any] = {"rule": rule} if rule in ("token", "block") else {}
        step.verifier.use_block_verification = rule == "block"
        if rule == "synthetic":
            rates = torch.full((step.k,), 0.5, device=device)
            step.verifier.synthetic_conditional_rates = arguments["accept_rates"] = rates
        elif rule == "FLy":
            arguments = {"fly_window_size": 1, "fly_entropy_threshold": 0.2, "fly_entropy_top_k": 4}
            for name, value in arguments.items():
                setattr(step.verifier, name, value)
        logits, *output = step.verify(verify)
        assert logits is step.arguments["target_logits"]
        check(step, output, **arguments)
    assert not handed_over
    assert _report.calls["RejectionSampler._verify (V2)"] == len(SEEDS)


@pytest.mark.parametrize("asked", [*PROCESSORS, ThinkingBudgetState])
def test_what_else_is_asked_of_logits_is_done_by_the_engine(
    device: str, verify: Any, handed_over: list[Call], asked: type
) -> None:
    """On a float32 copy, and filters go to verify_chain all the same."""
    for seed in SEEDS:
        step = FilteredStep(seed, device, asked=[asked])
        before = step.arguments["target_logits"].clone()
        rows, *output = step.verify(verify)
        assert torch.equal(rows, step.rows()) and rows.dtype == torch.float32
        check(step, output)
        assert torch.equal(step.arguments["target_logits"], before)
    assert not handed_over


@pytest.mark.parametrize(
    ("owner", "name", "value"),
    [
        ("sampler", "needs_logits_processing", np.zeros(NUM_SLOTS, dtype=bool)),
        ("sampler", "return_sampling_mask", True),
        ("sampler", "use_fp64_gumbel", True),
        ("sampler", "logprobs_mode", "processed_logprobs"),
        ("verifier", "watermark_key", 7),
        ("verifier", "fly_entropy_top_k", 65),
    ],
)
def test_the_engine_filters_what_is_not_there(
    verify: Any, handed_over: list[Call], owner: str, name: str, value: Any
) -> None:
    """Or where it has nothing to do, or shows what is left."""
    step = FilteredStep(0, "cpu")
    step.sampler.sampling_states.num_logprobs[step.slots[0]] = 2
    step.verifier.fly_window_size, step.verifier.fly_entropy_threshold = 1, 0.3
    step.verifier.fly_entropy_top_k = 3
    step.verify(verify)
    assert not handed_over
    setattr(getattr(step, owner), name, value)
    assert step.verify(verify) == "stock"
    ((args, kwargs),) = handed_over
    assert args[0] is step.verifier and args[1] is step.arguments["target_logits"] and not kwargs
    assert args[-1] is step.arguments["draft_sampled"]
    if name == "logprobs_mode":
        step.sampler.sampling_states.num_logprobs.fill(-1)
        assert step.verify(verify) != "stock", "nobody looks"


def test_samplers_of_another_class_are_served_by_the_engine(verify: Any, handed_over: list[Call]) -> None:
    """Of theirs nothing is known."""
    step = FilteredStep(0, "cpu")
    step.verifier.sampler = type("OtherSampler", (SimpleNamespace,), {})(sampling_states=None)
    assert step.verify(verify) == "stock"
    assert len(handed_over) == 1


@pytest.mark.parametrize("asked", [None, PenaltiesState])
def test_a_filtered_request_without_drafts_gets_what_is_drawn_without_verification(
    device: str, verify: Any, handed_over: list[Call], asked: type | None
) -> None:
    sample = runner_sampling.make_sample(noting(handed_over), SimpleNamespace, SimpleNamespace)
    compared = 0
    for seed in SEEDS:
        step = FilteredStep(seed, device, drafted=False, asked=[asked] if asked else ())
        given = step.arguments
        _, sampled, _ = step.verify(verify)
        arguments = [
            given["target_logits"],
            given["expanded_idx_mapping"],
            given["idx_mapping"],
            given["idx_mapping"].cpu().numpy(),
            given["pos"],
            given["draft_sampled"],
            given["expanded_local_pos"],
            None,
        ]
        drawn, rows = sample(step.sampler, *arguments)
        assert torch.equal(rows, step.rows())
        for r in range(step.size):
            if step.counts[r] == 0:
                assert sampled[r, 0] == drawn[step.first_rows[r]]
                compared += 1
    assert compared > len(SEEDS) / 2 and not handed_over
    step.sampler.use_fp64_gumbel = True
    assert sample(step.sampler, *arguments, return_logprobs=True) == "stock"
    assert handed_over == [((step.sampler, *arguments), {"return_logprobs": True})]
    step.sampler.use_fp64_gumbel, step.sampler.logprobs_mode = False, "processed_logits"
    assert sample(step.sampler, *arguments) != "stock"
    assert sample(step.sampler, *arguments, return_logprobs=True) == "stock"
    derived = type("Watermarking", (SimpleNamespace,), {})(**vars(step.sampler))
    assert sample(derived, *arguments) == "stock"


class Rows:
    """Random rows to draw from, some of no request."""

    def __init__(self, seed: int, device: str, dtype: torch.dtype = torch.float32) -> None:
        rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        self.size = 9
        logits = 2 * torch.randn(self.size, WIDTH + 4, generator=generator)
        slots = [slot if rng.random() < 0.7 else -1 for slot in rng.sample(range(NUM_SLOTS), self.size)]
        temperature = [rng.choice([0.0, 0.7, 1.0, 1.4]) for _ in range(NUM_SLOTS)]
        self.logits = logits.to(dtype).to(device)[:, :WIDTH]
        self.slots = torch.tensor(slots, dtype=torch.int32, device=device)
        self.temperature = torch.tensor(temperature, device=device)
        self.seed = torch.randint(-(2**62), 2**62, (NUM_SLOTS,), generator=generator).to(device)
        self.pos = torch.randint(0, 1000, (self.size,), generator=generator).to(device)
        self.cache = torch.full((NUM_SLOTS, 3, WIDTH + 2), 7.0, dtype=dtype, device=device)

    @property
    def arguments(self) -> tuple[Tensor, ...]:
        return self.logits, self.slots, self.temperature, self.seed, self.pos

    def alone(self, t: int, apply_temperature: bool, **keys: Any) -> int:
        """The token that ``sample`` draws from row t."""
        slot = int(self.slots[t])
        temperature = float(self.temperature[slot]) if slot >= 0 else 0.0
        if not apply_temperature:
            temperature = 1.0 if temperature > 0 else 0.0
        return int(
            specdec_ops.sample(
                self.logits[t : t + 1],
                temperature=temperature,
                seeds=int(self.seed[max(slot, 0)]),
                **{"positions": self.pos[t : t + 1], **keys},
            ).token_ids
        )


@pytest.mark.parametrize("is_drafting", [False, True])
@pytest.mark.parametrize("apply_temperature", [False, True])
def test_rows_get_what_sample_gives_them(
    device: str, gumbel_sample: Any, apply_temperature: bool, is_drafting: bool
) -> None:
    for seed in SEEDS:
        rows = Rows(seed, device, DTYPES[seed % 3])
        tokens = gumbel_sample(*rows.arguments, apply_temperature, is_drafting)
        assert tokens.dtype == torch.int64
        keys = {"draft_slot": 0} if is_drafting else {}
        assert tokens.tolist() == [rows.alone(t, apply_temperature, **keys) for t in range(rows.size)]
        nobodys = rows.slots < 0
        assert torch.equal(tokens[nobodys], rows.logits[nobodys].argmax(-1))


def test_a_request_without_drafts_gets_what_is_drawn_without_verification(
    device: str, gumbel_sample: Any, rejection_sample: Any
) -> None:
    """A seeded request does not notice whether others in its batch have drafts."""
    compared = 0
    for seed in SEEDS:
        step = Step(seed, device, drafted=False)
        given = step.arguments
        sampled, _ = rejection_sample(**given)
        drawn = gumbel_sample(
            given["target_logits"],
            given["expanded_idx_mapping"],
            given["temperature"],
            given["seed"],
            given["pos"],
            False,
            False,
        )
        for r in range(step.size):
            if step.counts[r] == 0:
                assert sampled[r, 0] == drawn[step.first_rows[r]]
                compared += 1
    assert compared > len(SEEDS) / 2


@pytest.mark.parametrize("column", ["one", "each"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_drafted_from_is_kept(
    device: str, gumbel_sample: Any, dtype: torch.dtype, column: str
) -> None:
    for seed in SEEDS:
        rows = Rows(seed, device, dtype)
        rows.logits[0, 3], rows.logits[1, 5] = float("nan"), -float("inf")
        if seed == 0:
            rows.slots.fill_(-1)
        columns = torch.tensor(1) if column == "one" else torch.arange(rows.size) % 3
        columns = columns.int().to(device)
        want = rows.cache.clone()
        for t, slot in enumerate(rows.slots.tolist()):
            if slot >= 0:
                want[slot, int(columns if column == "one" else columns[t]), :WIDTH] = rows.logits[t]
        gumbel_sample(*rows.arguments, True, True, logits_cache=rows.cache, logits_cache_col=columns)
        integer = torch.int32 if dtype == torch.float32 else torch.int16
        assert torch.equal(rows.cache.view(integer), want.view(integer))


def test_another_source_is_kept_instead(device: str, gumbel_sample: Any) -> None:
    rows = Rows(3, device)
    source = torch.randn_like(rows.logits)
    column = torch.tensor(2, device=device)
    tokens = gumbel_sample(
        *rows.arguments,
        False,
        False,
        logits_cache=rows.cache,
        logits_cache_col=column,
        logits_cache_source=source,
    )
    assert tokens.tolist() == [rows.alone(t, False) for t in range(rows.size)]
    kept = rows.slots >= 0
    assert torch.equal(rows.cache[rows.slots[kept].long(), 2, :WIDTH], source[kept])


def test_a_draft_is_keyed_by_its_place_too(device: str, gumbel_sample: Any) -> None:
    """The positions of a place do not meet those of another; without a cache the place is the first."""
    rows = Rows(1, device)
    rows.logits.fill_(0.0)
    rows.slots, rows.temperature = (
        torch.arange(rows.size, device=device),
        torch.ones(NUM_SLOTS, device=device),
    )
    drawn = []
    for place in range(3):
        column = torch.tensor(place, dtype=torch.int32, device=device)
        tokens = gumbel_sample(
            *rows.arguments, True, True, logits_cache=rows.cache, logits_cache_col=column
        ).tolist()
        assert tokens == [rows.alone(t, True, draft_slot=place) for t in range(rows.size)]
        drawn.append(tokens)
    assert drawn[0] == gumbel_sample(*rows.arguments, True, True).tolist()
    assert drawn[0] != drawn[1] != drawn[2] != drawn[0]


@pytest.mark.parametrize(
    ("feature", "asked"),
    [
        ("Gumbel noise in float64", {"use_fp64": True}),
        ("caches of such logits", {"logits_cache": torch.zeros(NUM_SLOTS, 1, WIDTH - 1)}),
        ("caches of such logits", {"logits_cache": torch.zeros(NUM_SLOTS, 1, WIDTH).half()}),
        ("caches of such logits", {"logits_cache_source": torch.zeros(9, WIDTH), "logits_cache": None}),
    ],
    ids=["float64", "narrow", "dtype", "no cache"],
)
def test_the_engine_draws_or_refuses_what_is_not_there(
    gumbel_sample: Any, handed_over: list[Call], feature: str, asked: dict[str, Any]
) -> None:
    rows = Rows(0, "cpu")
    options = {"logits_cache_col": torch.tensor(0), **asked}
    assert gumbel_sample(*rows.arguments, True, True, **options) == "stock"
    ((args, kwargs),) = handed_over
    got = dict(zip(inspect.signature(gumbel_sample).parameters, args, strict=False)) | kwargs
    assert got["apply_temperature"] is got["is_drafting"] is True
    assert all(got[name] is value for name, value in options.items())
    assert _report.handed_over == {feature: 1}


def draw_otherwise(
    logits: Tensor,
    slots: Tensor,
    temperature: Tensor,
    *_: Any,
    logits_cache: Tensor,
    logits_cache_col: Tensor,
    **__: Any,
) -> Tensor:
    """What vLLM's ``gumbel_sample`` does with a temperature and a cache, with noise of torch's generator."""
    logits_cache[slots, logits_cache_col] = logits
    noise = -torch.empty(logits.shape, device=logits.device).exponential_().log()
    return (logits.float() / temperature[slots, None] + noise).argmax(-1)


@pytest.mark.parametrize("block", [False, True], ids=["token level", "block"])
@pytest.mark.parametrize("drawn_by", ["sample", "another's draw"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_decoding_follows_the_law_of_the_target(
    device: str, gumbel_sample: Any, rejection_sample: Any, temperature: float, drawn_by: str, block: bool
) -> None:
    """Whole runs, drafted with the seeds that verify: at each position, and at pairs of them.

    By default the engine draws the drafts.
    """
    torch.manual_seed(0)
    draw = gumbel_sample if drawn_by == "sample" else draw_otherwise
    num_runs, num_tokens, k, vocab_size = 20_000, 5, 2, 3
    # Each run has its own chain of tokens: the law of one depends on the one before.
    table = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.6, 0.3], [0.4, 0.2, 0.4]], device=device)
    draft_table = table.flip(1).log().bfloat16()
    seeds = torch.arange(num_runs, device=device) * 7919
    temperatures = torch.full((num_runs,), temperature, device=device)
    cache = torch.empty(num_runs, k, vocab_size, dtype=torch.bfloat16, device=device)
    output = torch.zeros(num_runs, num_tokens + k, dtype=torch.int64, device=device)
    lengths = torch.ones(num_runs, dtype=torch.int64, device=device)
    while (lengths < num_tokens).any():
        active = (lengths < num_tokens).nonzero().flatten()
        starts, n = lengths[active], len(active)
        inputs = torch.zeros(n, k + 1, dtype=torch.int64, device=device)
        inputs[:, 0] = output[active, starts - 1]
        for place in range(k):
            inputs[:, place + 1] = draw(
                draft_table[inputs[:, place]],
                active,
                temperatures,
                seeds,
                starts - 1 + place,
                apply_temperature=True,
                is_drafting=True,
                logits_cache=cache,
                logits_cache_col=torch.tensor(place, device=device),
            )
        sampled, counts = rejection_sample(
            table.log()[inputs.flatten()] / temperature,
            cache,
            inputs.flatten(),
            torch.arange(n + 1, dtype=torch.int32, device=device) * (k + 1),
            (starts[:, None] - 1 + torch.arange(k + 1, device=device)).flatten(),
            active,
            active.repeat_interleave(k + 1),
            torch.arange(k + 1, device=device).repeat(n),
            temperatures,
            seeds,
            k,
            use_block_verification=block,
        )
        for column in range(k + 1):
            valid = counts > column
            output[active[valid], starts[valid] + column] = sampled[valid, column]
        lengths[active] += counts
    law = (table.log() / temperature).softmax(-1).double().cpu()
    joint, tokens = law[0], output.cpu()
    for position in range(2, num_tokens):
        pairs = torch.bincount(tokens[:, position - 1] * vocab_size + tokens[:, position], minlength=9)
        expected = (joint[:, None] * law).flatten()
        assert chi_square.p_value(pairs, expected / expected.sum()) > ALARM, position
        joint = joint @ law


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("alike", [True, False], ids=["as many drafts", "ragged"])
def test_nothing_waits_for_the_device_and_graphs_repeat_it(
    rejection_sample: Any, gumbel_sample: Any, alike: bool
) -> None:
    step, rows = Step(5, "cuda", alike=alike), Rows(5, "cuda")
    column = torch.tensor(1, device="cuda")

    def run() -> tuple[Tensor, ...]:
        tokens = gumbel_sample(*rows.arguments, True, True, logits_cache=rows.cache, logits_cache_col=column)
        blocks = rejection_sample(**step.arguments, use_block_verification=True)
        return (*rejection_sample(**step.arguments), *blocks, tokens)

    run()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = run()
        for seed in range(3):
            step.arguments["seed"].add_(seed)
            rows.seed.add_(seed)
            rows.logits.add_(0.25)
            rows.cache.fill_(7.0)
            graph.replay()
            replayed = [tensor.clone() for tensor in (*captured, rows.cache)]
            rows.cache.fill_(7.0)
            direct = (*run(), rows.cache)
            torch.cuda.set_sync_debug_mode("default")
            assert all(torch.equal(a, b) for a, b in zip(replayed, direct, strict=True))
            torch.cuda.set_sync_debug_mode("error")
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_every_function_has_its_name_in_vllm_and_its_importers() -> None:
    assert runner_sampling.FUNCTIONS.keys() == runner_sampling.IMPORTERS.keys()
    for name, make in runner_sampling.FUNCTIONS.items():
        module, _, attribute = name.rpartition(".")
        assert make(noting([])).__name__ == attribute
        assert module.startswith("vllm.v1.worker.gpu.") and module not in runner_sampling.IMPORTERS[name]
    assert runner_sampling.FUNCTIONS.keys() > runner_sampling.IF_ALL
