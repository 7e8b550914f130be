"""The demo: its models, its decoding loop and its command line."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("safetensors")
pytest.importorskip("matplotlib")
pytest.importorskip("tqdm")

from examples import generate as command
from examples.corpus import HELD_OUT, held_out_prompts, library_path, training_text
from examples.engine import Drafter, Drafts, Generation, ModelDrafter, NgramDrafter, Requests, generate
from examples.model import MODEL_DIR, Decoder, Transformer, load_model
from examples.two_sample import sample_openings, two_sample_p_value

ROOT = Path(__file__).resolve().parents[1]
CAPACITY = 192
K = 4


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def target() -> Transformer:
    return load_model("target")


@pytest.fixture(scope="module")
def draft() -> Transformer:
    return load_model("draft")


def ragged_prompts(count: int = 4) -> list[bytes]:
    """Prompts of different lengths."""
    return [text[: 96 - 7 * i] for i, (_, text) in enumerate(held_out_prompts(count, 96))]


def token_rows(count: int, length: int) -> Tensor:
    return torch.tensor([list(text) for _, text in held_out_prompts(count, length)])


def decode(
    target: Transformer,
    drafter: Drafter | None,
    prompts: list[bytes],
    *,
    temperature: float = 0.0,
    num_tokens: int = 48,
    k: int = K,
) -> Generation:
    return generate(
        Decoder(target, len(prompts), CAPACITY),
        drafter,
        prompts,
        num_tokens=num_tokens,
        temperature=temperature,
        seeds=torch.arange(len(prompts)),
        max_drafts=k,
    )


def make_drafter(name: str, draft: Transformer, batch: int) -> Drafter:
    return NgramDrafter() if name == "ngram" else ModelDrafter(Decoder(draft, batch, CAPACITY))


@pytest.mark.parametrize(("name", "least_length"), [("ngram", 1.3), ("draft", 2.0)])
def test_greedy_text_is_the_plain_runs(
    target: Transformer, draft: Transformer, name: str, least_length: float
) -> None:
    prompts = ragged_prompts()
    plain = decode(target, None, prompts)
    speculative = decode(target, make_drafter(name, draft, len(prompts)), prompts)

    assert speculative.texts == plain.texts
    assert [len(text) for text in plain.texts] == [48] * 4
    assert sum(speculative.drafted) > 0
    assert sum(speculative.accepted) > 0
    assert speculative.num_emitted == plain.num_emitted == 4 * 48
    assert speculative.num_emitted == sum(speculative.accepted) + speculative.num_steps
    assert speculative.num_emitted / speculative.num_steps > least_length


@pytest.mark.parametrize("batch", [1, 2, 5])
def test_greedy_text_does_not_depend_on_the_batch(
    target: Transformer, draft: Transformer, batch: int
) -> None:
    prompts = ragged_prompts(5)
    alone = decode(target, None, prompts).texts
    together = decode(target, make_drafter("draft", draft, batch), prompts[:batch])
    assert together.texts == alone[:batch]


@pytest.mark.parametrize("k", [1, 9])
def test_other_draft_lengths(target: Transformer, draft: Transformer, k: int) -> None:
    prompts = ragged_prompts()
    speculative = decode(target, make_drafter("draft", draft, 4), prompts, k=k)
    assert speculative.texts == decode(target, None, prompts).texts
    assert all(n > 0 for n in speculative.drafted)


def test_sampled_text_is_repeatable_and_seeded(target: Transformer, draft: Transformer) -> None:
    prompts = ragged_prompts(1) * 4
    first, second = (
        decode(target, make_drafter("draft", draft, 4), prompts, temperature=0.8, num_tokens=24)
        for _ in range(2)
    )
    assert first.texts == second.texts
    assert len(set(first.texts)) > 1


def products_depend_on_rows() -> bool:
    """Whether this CPU's matrix products round a row differently among 4 and among 52 rows."""
    x, narrow, wide = torch.randn(52, 256), torch.randn(64, 256), torch.randn(256, 64)
    return not all(
        torch.equal((x[:4, : w.shape[0]] @ w), (x[:, : w.shape[0]] @ w)[:4]) for w in (narrow, wide)
    )


@pytest.mark.parametrize(
    ("width", "batch", "threads"),
    [(2, 4, 1), (5, 4, 1), (13, 4, 1), (2, 1, 1), (5, 1, 1), (5, 3, 1), (5, 1, 2), (5, 4, 2)],
)
def test_logits_are_the_same_bits_for_any_step_width(
    target: Transformer, width: int, batch: int, threads: int
) -> None:
    torch.set_num_threads(threads)
    tokens = token_rows(batch, 96)
    decoder = Decoder(target, batch, CAPACITY)
    lengths = torch.full((batch,), 57)
    decoder.step(tokens[:, :57], torch.zeros_like(lengths))
    single = [decoder.step(tokens[:, 57 + i : 58 + i], lengths + i) for i in range(width)]
    together = decoder.step(tokens[:, 57 : 57 + width], lengths).view(batch, width, -1)
    torch.testing.assert_close(torch.stack(single, dim=1), together, rtol=0, atol=1e-4)
    if products_depend_on_rows():
        pytest.skip("this CPU's matrix products depend on the number of rows")
    assert torch.equal(torch.stack(single, dim=1), together)


def test_ragged_steps_and_rollback_match_a_full_forward(target: Transformer) -> None:
    tokens = token_rows(4, 96)
    full = target(tokens)
    decoder = Decoder(target, 4, CAPACITY)
    lengths = torch.tensor([40, 53, 31, 60])
    decoder.step(tokens[:, :60], torch.zeros(4, dtype=torch.int64))
    decoder.step(torch.randint(256, (4, 9)), lengths)
    for width in (1, 4, 3):
        columns = lengths.unsqueeze(1) + torch.arange(width)
        logits = decoder.step(tokens.gather(1, columns), lengths).view(4, width, -1)
        expected = full[torch.arange(4).unsqueeze(1), columns]
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-3)
        lengths = lengths + width


def test_positions_beyond_the_length_are_not_seen(target: Transformer) -> None:
    tokens = token_rows(4, 96)
    clean, dirty = Decoder(target, 4, CAPACITY), Decoder(target, 4, CAPACITY)
    lengths = torch.tensor([40, 53, 31, 60])
    for decoder in (clean, dirty):
        decoder.step(tokens[:, :60], torch.zeros(4, dtype=torch.int64))
    dirty.step(torch.randint(256, (4, 30)), lengths + 1)
    newest = tokens.gather(1, lengths.unsqueeze(1))
    assert torch.equal(clean.step(newest, lengths), dirty.step(newest, lengths))


class CheckedDrafter(ModelDrafter):
    """Compares the logits that come with the drafts with a forward pass over the whole text."""

    def __init__(self, model: Transformer, batch: int) -> None:
        super().__init__(Decoder(model, batch, CAPACITY))
        self.model = model
        self.num_checked = 0

    def propose(self, requests: Requests, max_counts: list[int]) -> Drafts:
        drafts = super().propose(requests, max_counts)
        start = 0
        lengths = (requests.cached_lengths + 1).tolist()
        for r, (row, length, count) in enumerate(zip(requests.text, lengths, drafts.counts, strict=True)):
            if count:
                assert drafts.logits is not None
                text = torch.cat([row[:length], drafts.token_ids[start : start + count]])
                expected = self.model(text.unsqueeze(0))[0, length - 1 : -1]
                torch.testing.assert_close(drafts.logits[r, :count], expected, rtol=0, atol=1e-3)
            start += count
            self.num_checked += count
        return drafts


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_draft_law_is_the_draft_models(target: Transformer, draft: Transformer, temperature: float) -> None:
    drafter = CheckedDrafter(draft, 4)
    generation = decode(target, drafter, ragged_prompts(), temperature=temperature, num_tokens=24)
    assert drafter.num_checked == sum(generation.drafted) > 0
    assert generation.accepted[-1] > 0


def test_ngram_drafts() -> None:
    drafter = NgramDrafter()
    assert drafter.look_up(b"self.open(); self.op", 3) == b"en("
    assert drafter.look_up(b"abc1 abc2 abc", 2) == b"2 "
    assert drafter.look_up(b"ab ab ab", 5) == b" ab a"
    assert drafter.look_up(b"nothing here", 3) == b""


def test_ngram_drafts_are_ragged(target: Transformer) -> None:
    prompts = [b"alpha beta alpha be", b"xyzuvw", b"return self.x\nreturn se"]
    requests = Requests(prompts, num_tokens=8, temperature=0.0, seeds=torch.arange(3), max_drafts=K)
    drafts = NgramDrafter().propose(requests, [4, 4, 2])
    assert drafts.counts == [4, 0, 2]
    assert bytes(drafts.token_ids.tolist()) == b"ta alf"


def test_sampled_tokens_follow_the_plain_sampler(target: Transformer, draft: Transformer) -> None:
    context, batch, capacity = command.repetitive_contexts(1)[0], 256, 64
    decoder = Decoder(target, batch, capacity)

    def openings(drafter: Drafter | None, temperature: float, first_seed: int) -> list[bytes]:
        return sample_openings(
            decoder,
            drafter,
            context,
            num_tokens=3,
            temperature=temperature,
            first_seed=first_seed,
            rounds=4,
        )

    def p_value(speculative: list[bytes]) -> float:
        return two_sample_p_value(
            [(Counter(text[i] for text in plain), Counter(text[i] for text in speculative)) for i in range(2)]
        )

    ngram, model = NgramDrafter(), ModelDrafter(Decoder(draft, batch, capacity))
    plain = openings(None, 0.8, 0)
    assert p_value(openings(ngram, 0.8, 10**6)) > 1e-3
    assert p_value(openings(model, 0.8, 2 * 10**6)) > 1e-3
    assert p_value(openings(ngram, 0.5, 3 * 10**6)) < 1e-3


def test_p_value_of_equal_and_of_different_laws() -> None:
    generator = torch.Generator().manual_seed(0)
    weights = torch.tensor([0.4, 0.3, 0.2, 0.1])

    def draw(law: Tensor) -> Counter[int]:
        return Counter(torch.multinomial(law, 4000, replacement=True, generator=generator).tolist())

    equal = [two_sample_p_value([(draw(weights), draw(weights))]) for _ in range(200)]
    assert 0.4 < sum(equal) / len(equal) < 0.6
    assert two_sample_p_value([(draw(weights), draw(weights + torch.tensor([0.05, -0.05, 0, 0])))]) < 1e-3
    assert two_sample_p_value([(Counter({3: 50}), Counter({3: 50}))]) == 1.0


def test_weights_are_small_and_the_draft_is_cheaper(target: Transformer, draft: Transformer) -> None:
    assert sum(path.stat().st_size for path in MODEL_DIR.glob("*.safetensors")) <= 4 * 2**20
    sizes = [sum(p.numel() for p in model.parameters()) for model in (target, draft)]
    assert 4 <= sizes[0] / sizes[1] <= 8


def test_prompts_are_kept_out_of_training() -> None:
    training = training_text().tobytes()
    assert len(training) > 10**6
    for name in HELD_OUT:
        text = (library_path() / name).read_bytes()
        assert text[len(text) // 3 : len(text) // 3 + 400] not in training


def test_help() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "examples.generate", "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.startswith("usage: python -m examples.generate")
    for option in ("--model", "--drafter", "--k", "--temperature", "--seed", "--prompt-file"):
        assert option in result.stdout


@pytest.fixture
def small_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Options of a run that takes seconds."""
    monkeypatch.setattr(command, "CONTEXT_BATCH", 128)
    monkeypatch.setattr(command, "CONTEXT_ROUNDS", 1)
    return ["--num-tokens", "24", "--batches", "1", "--rounds", "1", "--out", str(tmp_path)]


def test_command(small_run: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(small_run) == 0
    table = capsys.readouterr().out
    assert table.count("text = plain") == 2
    assert table.count("temperature 0.8") == 3
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert "greedy: plain, n-gram, draft model" in (tmp_path / "generated.txt").read_text()


def test_command_reads_a_prompt_file(small_run: list[str], tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("import os\nimport sys\nimport \n\ndef main():\n    args = parse_args()\n    ar\n")
    assert (
        command.main([*small_run, "--prompt-file", str(prompts), "--drafter", "ngram", "--temperature", "0"])
        == 0
    )
    assert "prompts.txt, block 2" in (tmp_path / "generated.txt").read_text()


class SilentDrafter(NgramDrafter):
    def look_up(self, text: bytes, count: int) -> bytes:
        return b""


class WrongDrafter(NgramDrafter):
    def look_up(self, text: bytes, count: int) -> bytes:
        return b"\0" * count


@pytest.mark.parametrize(("drafter", "message"), [(SilentDrafter, "0 drafted"), (WrongDrafter, "0 accepted")])
def test_command_fails_without_drafts(
    small_run: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    drafter: type[NgramDrafter],
    message: str,
) -> None:
    monkeypatch.setattr(command, "NgramDrafter", drafter)
    assert command.main([*small_run, "--drafter", "ngram", "--temperature", "0"]) == 1
    assert message in capsys.readouterr().err


def test_command_fails_if_the_text_differs(
    small_run: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    original = command.generate

    def changed(
        target: Decoder, drafter: Drafter | None, prompts: list[bytes], **options: object
    ) -> Generation:
        generation = original(target, drafter, prompts, **options)
        if drafter is not None:
            generation.texts[0] = generation.texts[0][:-1] + b"\0"
        return generation

    monkeypatch.setattr(command, "generate", changed)
    assert command.main([*small_run, "--drafter", "ngram", "--temperature", "0"]) == 1
    assert "text differs from plain in 1 of 4" in capsys.readouterr().err


def test_command_says_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--model", str(tmp_path)]) == 2
    assert "python -m examples.train" in capsys.readouterr().err


def test_command_refuses_a_text_that_is_too_long(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--num-tokens", "1000"]) == 2
    assert "the model has 384" in capsys.readouterr().err
