"""Decodes real text plainly, with an n-gram drafter and with a draft model, and compares them.

The target and draft are small byte-level transformers; every draft is verified by specdec_ops.
Prompts come from standard-library files that the models were not trained on. Greedy text has to be
the plain run's to the byte; at a temperature the loop's first two tokens have to follow the plain
sampler's distribution (chi-square test). The exit status is 1 if either fails, or if nothing was
drafted or accepted.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
from collections import Counter
from pathlib import Path

import specdec_ops
import torch
from tqdm import tqdm

from examples.corpus import held_out_prompts
from examples.engine import Drafter, Generation, ModelDrafter, NgramDrafter, capacity_for, generate
from examples.model import MODEL_DIR, Decoder, Transformer, load_model
from examples.report import LABELS, Result, draw, format_table, write_texts
from examples.two_sample import sample_openings, two_sample_p_value

MIN_P_VALUE = 1e-3
PROMPT_LENGTH = 96
NUM_CONTEXTS = 2
CONTEXT_LENGTHS = range(32, 56)
CONTEXT_BATCH, CONTEXT_ROUNDS = 512, 8

Key = tuple[str, float]


@dataclasses.dataclass
class Runs:
    """The measured runs of one drafter at one temperature."""

    seconds: list[float] = dataclasses.field(default_factory=list)
    texts: list[bytes] = dataclasses.field(default_factory=list)
    num_emitted: int = 0
    num_steps: int = 0
    drafted: list[int] = dataclasses.field(default_factory=list)
    accepted: list[int] = dataclasses.field(default_factory=list)

    def add_counts(self, generations: list[Generation]) -> None:
        """Takes the texts and counts of one round; every round gives the same ones."""
        self.texts = [text for g in generations for text in g.texts]
        self.num_emitted = sum(g.num_emitted for g in generations)
        self.num_steps = sum(g.num_steps for g in generations)
        self.drafted = [sum(counts) for counts in zip(*(g.drafted for g in generations), strict=True)]
        self.accepted = [sum(counts) for counts in zip(*(g.accepted for g in generations), strict=True)]


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.generate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--model",
        type=Path,
        default=MODEL_DIR,
        metavar="FOLDER",
        help="folder with target.safetensors and draft.safetensors (default: examples/models)",
    )
    parser.add_argument(
        "--drafter",
        choices=("plain", "ngram", "draft", "all"),
        default="all",
        help="what proposes drafts; the plain run is always made too (default: all)",
    )
    parser.add_argument(
        "--k", type=int, default=4, help="drafts of a request in one step, at most (default: 4)"
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.8,
        help="of the sampled runs, which come after the greedy ones; 0 leaves them out (default: 0.8)",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampled runs (default: 0)")
    parser.add_argument(
        "--prompt-file",
        type=Path,
        metavar="FILE",
        help="text whose blocks between empty lines are the prompts (default: held-out library files)",
    )
    parser.add_argument(
        "--num-tokens", type=int, default=144, help="bytes to write after each prompt (default: 144)"
    )
    parser.add_argument("--batch", type=int, default=4, help="requests decoded together (default: 4)")
    parser.add_argument("--batches", type=int, default=3, help="batches in a round (default: 3)")
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds; the median counts (default: 5)")
    parser.add_argument(
        "--threads", type=int, default=1, help="CPU threads (default: 1; the models are small)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("out"),
        metavar="FOLDER",
        help="folder for demo.png and generated.txt (default: out)",
    )
    options = parser.parse_args(arguments)
    for name in ("k", "num_tokens", "batch", "batches", "rounds", "threads"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')}: {getattr(options, name)} is less than 1")
    if not 0 <= options.temperature < float("inf"):
        parser.error(f"--temperature: {options.temperature} is not a finite number from 0")
    return options


def read_prompts(options: argparse.Namespace) -> list[tuple[str, bytes]]:
    """The prompts with their names; a file's are repeated to fill the batches."""
    count = options.batch * options.batches
    if options.prompt_file is None:
        return held_out_prompts(count, PROMPT_LENGTH)
    blocks = [block.strip(b"\n") for block in options.prompt_file.read_bytes().split(b"\n\n")]
    prompts = [
        (f"{options.prompt_file}, block {i + 1}", block) for i, block in enumerate(blocks) if len(block) > 1
    ]
    if not prompts:
        raise ValueError(f"--prompt-file: {options.prompt_file} has no block of text")
    return [prompts[i % len(prompts)] for i in range(count)]


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    options = parse_arguments(arguments)
    try:
        target, draft = load_model("target", options.model), load_model("draft", options.model)
        prompts = read_prompts(options)
        longest = max(len(prompt) for _, prompt in prompts)
        capacity = capacity_for(target, longest, options.num_tokens, options.k)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    torch.set_num_threads(options.threads)

    names = ["plain", "ngram", "draft"] if options.drafter == "all" else ["plain", options.drafter]
    names = list(dict.fromkeys(names))
    temperatures = [0.0] if options.temperature == 0 else [0.0, options.temperature]
    print(
        f"specdec_ops {specdec_ops.__version__}; target {_size(target)}, draft {_size(draft)} parameters\n"
        f"{len(prompts)} prompts in batches of {options.batch}, {options.num_tokens} bytes each, "
        f"k = {options.k}, {options.threads} thread{'s' if options.threads > 1 else ''}"
    )
    runs = measure(target, draft, prompts, names, temperatures, options, capacity)
    p_values = {}
    if len(names) > 1 and len(temperatures) > 1:
        p_values = check_distributions(target, draft, names, options)
    results = [summarize(key, runs, p_values) for key in runs]

    modes = {r.temperature: r.mode for r in results}
    options.out.mkdir(parents=True, exist_ok=True)
    caption = (
        f"Byte-level transformers ({_size(target)} and {_size(draft)} parameters), batch {options.batch}, "
        f"k = {options.k}, {options.threads} CPU thread{'s' if options.threads > 1 else ''}; "
        f"median of {options.rounds} round{'s' if options.rounds > 1 else ''}"
    )
    draw(results, options.out / "demo.png", caption)
    write_texts(options.out / "generated.txt", prompts, {key: run.texts for key, run in runs.items()}, modes)

    print(f"\n{format_table(results)}\n")
    print(
        "tokens/s: of the whole batch, without reading the prompts; speed-up: median over the rounds\n"
        "acceptance length: the accepted drafts of a request and step + 1\n"
        "acceptance by position: share of the drafts there that were accepted, with all before them"
    )
    if p_values:
        samples = CONTEXT_BATCH * CONTEXT_ROUNDS
        print(
            f"p: chi-square test of the 1st and 2nd emitted token against the plain sampler, "
            f"{NUM_CONTEXTS} contexts of {samples:,} draws each; fails below {MIN_P_VALUE:g}"
        )
    print(f"saved: {options.out / 'demo.png'}, {options.out / 'generated.txt'}")
    failures = [f"{LABELS[r.drafter]}, {r.mode}: {r.check}" for r in results if not r.passed]
    for failure in failures:
        print(f"FAILED: {failure}", file=sys.stderr)
    return 1 if failures else 0


def measure(
    target_model: Transformer,
    draft_model: Transformer,
    prompts: list[tuple[str, bytes]],
    names: list[str],
    temperatures: list[float],
    options: argparse.Namespace,
    capacity: int,
) -> dict[Key, Runs]:
    """Runs every drafter at every temperature, in turn within each round, after one round to warm up."""
    target = Decoder(target_model, options.batch, capacity)
    drafters = make_drafters(draft_model, options.batch, capacity)
    runs = {(name, temperature): Runs() for temperature in temperatures for name in names}
    batches = [
        [text for _, text in prompts[i : i + options.batch]] for i in range(0, len(prompts), options.batch)
    ]
    total = (options.rounds + 1) * len(runs) * len(batches)
    with tqdm(total=total, desc="decoding", unit="batch", disable=None) as bar:
        for round_number in range(options.rounds + 1):
            for key, run in runs.items():
                name, temperature = key
                bar.set_postfix_str(
                    f"{LABELS[name]}, {'greedy' if temperature == 0 else f'T = {temperature:g}'}"
                )
                generations = []
                for i, batch in enumerate(batches):
                    generations.append(
                        generate(
                            target,
                            drafters[name],
                            batch,
                            num_tokens=options.num_tokens,
                            temperature=temperature,
                            seeds=options.seed + i * options.batch + torch.arange(options.batch),
                            max_drafts=options.k,
                        )
                    )
                    bar.update()
                if round_number > 0:
                    run.seconds.append(sum(g.seconds for g in generations))
                    run.add_counts(generations)
    return runs


def make_drafters(draft_model: Transformer, batch: int, capacity: int) -> dict[str, Drafter | None]:
    """All drafters by name."""
    return {
        "plain": None,
        "ngram": NgramDrafter(),
        "draft": ModelDrafter(Decoder(draft_model, batch, capacity)),
    }


def check_distributions(
    target_model: Transformer, draft_model: Transformer, names: list[str], options: argparse.Namespace
) -> dict[str, tuple[float, float]]:
    """P-values of the first and the second token that the speculative loop emits after some contexts.

    The seeds of all samples differ, since equal seeds would give them the same random numbers.

    Args:
        target_model: The target.
        draft_model: The draft.
        names: Drafters to check against the first of them, the plain run.
        options: The command line.
    """
    num_tokens = 3
    capacity = capacity_for(target_model, CONTEXT_LENGTHS.stop, num_tokens, num_tokens)
    target = Decoder(target_model, CONTEXT_BATCH, capacity)
    drafters = make_drafters(draft_model, CONTEXT_BATCH, capacity)
    contexts = repetitive_contexts(NUM_CONTEXTS)
    counts: dict[str, list[list[Counter[int]]]] = {name: [[], []] for name in names}
    with tqdm(total=len(contexts) * len(names), desc="two-sample test", unit="sample", disable=None) as bar:
        for c, context in enumerate(contexts):
            for i, name in enumerate(names):
                openings = sample_openings(
                    target,
                    drafters[name],
                    context,
                    num_tokens=num_tokens,
                    temperature=options.temperature,
                    first_seed=options.seed + (i + 1) * 10**6 + c * 10**8,
                    rounds=CONTEXT_ROUNDS,
                )
                for position in range(2):
                    counts[name][position].append(Counter(text[position] for text in openings))
                bar.update()
    plain = counts[names[0]]
    p_values = {}
    for name in names[1:]:
        first, second = (
            two_sample_p_value(list(zip(plain[position], counts[name][position], strict=True)))
            for position in range(2)
        )
        p_values[name] = (first, second)
    return p_values


def repetitive_contexts(count: int) -> list[bytes]:
    """Openings of held-out prompts, cut where the n-gram drafter finds two drafts."""
    drafter = NgramDrafter()
    contexts = []
    for _, text in held_out_prompts(3 * count, CONTEXT_LENGTHS.stop):
        cuts = [n for n in CONTEXT_LENGTHS if len(drafter.look_up(text[:n], 2)) == 2]
        if cuts:
            contexts.append(text[: cuts[-1]])
    return contexts[:count]


def summarize(key: Key, runs: dict[Key, Runs], p_values: dict[str, tuple[float, float]]) -> Result:
    """One drafter's row of the table, with its checks."""
    name, temperature = key
    run, plain = runs[key], runs["plain", temperature]
    if name == "plain":
        check, passed = "-", True
    elif sum(run.drafted) == 0 or sum(run.accepted) == 0:
        check, passed = f"{sum(run.drafted)} drafted, {sum(run.accepted)} accepted", False
    elif temperature == 0:
        different = [i + 1 for i, (a, b) in enumerate(zip(run.texts, plain.texts, strict=True)) if a != b]
        check, passed = "text = plain", not different
        if different:
            check = f"text differs from plain in {len(different)} of {len(run.texts)} (prompt {different[0]})"
    else:
        first, second = p_values[name]
        check, passed = f"p = {first:.3f}, {second:.3f}", min(first, second) > MIN_P_VALUE
    seconds = statistics.median(run.seconds)
    return Result(
        drafter=name,
        temperature=temperature,
        tokens_per_second=run.num_emitted / seconds,
        speed_up=statistics.median(p / s for p, s in zip(plain.seconds, run.seconds, strict=True)),
        acceptance_length=run.num_emitted / run.num_steps,
        acceptance=[a / d if d else None for a, d in zip(run.accepted, run.drafted, strict=True)],
        drafts_per_step=sum(run.drafted) / run.num_steps,
        check=check,
        passed=passed,
    )


def _size(model: Transformer) -> str:
    return f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f}M"


if __name__ == "__main__":
    sys.exit(main())
