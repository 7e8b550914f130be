"""The demo's table, chart and text file."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

LABELS = {"plain": "plain", "ngram": "n-gram", "draft": "draft model"}
COLORS = {"plain": "#8a8f98", "ngram": "#d9822b", "draft": "#2b6cb0"}


@dataclasses.dataclass
class Result:
    """One row of the table."""

    drafter: str
    temperature: float
    tokens_per_second: float
    speed_up: float
    acceptance_length: float
    #: Share of the drafts at each position that were accepted; None where nothing was drafted.
    acceptance: list[float | None]
    #: Drafts proposed, for each request and step.
    drafts_per_step: float
    #: What the check of the text says, and whether it passed.
    check: str
    passed: bool

    @property
    def mode(self) -> str:
        """Greedy or the temperature."""
        return "greedy" if self.temperature == 0 else f"temperature {self.temperature:g}"


def format_table(results: list[Result]) -> str:
    """The table as text."""
    header = [
        "drafter",
        "mode",
        "tokens/s",
        "speed-up",
        "acceptance length",
        "drafts/step",
        "acceptance by position",
        "check",
    ]
    rows = [header]
    for r in results:
        by_position = " ".join("   -" if rate is None else f"{rate:4.2f}" for rate in r.acceptance)
        plain = r.drafter == "plain"
        rows.append(
            [
                LABELS[r.drafter],
                r.mode,
                f"{r.tokens_per_second:,.0f}",
                f"{r.speed_up:.2f}x",
                f"{r.acceptance_length:.2f}",
                "-" if plain else f"{r.drafts_per_step:.2f}",
                "-" if plain else by_position,
                r.check,
            ]
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
    right_aligned = range(2, 6)
    lines = [
        "  ".join(
            cell.rjust(width) if i in right_aligned else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def draw(results: list[Result], path: Path, caption: str) -> None:
    """Acceptance by position and speed of each drafter, as a PNG."""
    plt.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.4), layout="constrained")
    for r in results:
        points = [(i + 1, rate) for i, rate in enumerate(r.acceptance) if rate is not None]
        if points:
            left.plot(
                *zip(*points, strict=True),
                color=COLORS[r.drafter],
                linestyle="-" if r.temperature == 0 else "--",
                marker="o" if r.temperature == 0 else "s",
                markerfacecolor=COLORS[r.drafter] if r.temperature == 0 else "white",
                label=f"{LABELS[r.drafter]}, {r.mode}",
            )
    left.set(xlabel="Draft position", ylabel="Drafts accepted", title="Acceptance by position", ylim=(0, 1.0))
    left.yaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1.0))
    left.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True))
    left.grid(alpha=0.25)
    if left.lines:
        left.legend(frameon=False)

    modes = list(dict.fromkeys(r.mode for r in results))
    drafters = list(dict.fromkeys(r.drafter for r in results))
    width = 0.8 / len(drafters)
    for r in results:
        x = modes.index(r.mode) + (drafters.index(r.drafter) - (len(drafters) - 1) / 2) * width
        right.bar(
            x,
            r.tokens_per_second,
            width * 0.94,
            color=COLORS[r.drafter],
            label=LABELS[r.drafter] if r.mode == modes[0] else None,
        )
        right.annotate(
            f"{r.speed_up:.2f}×", (x, r.tokens_per_second), (0, 3), textcoords="offset points", ha="center"
        )
    right.set_xticks(range(len(modes)), modes)
    right.set(ylabel="Tokens per second (batch total)", title="Decoding speed, and speed-up over plain")
    right.set_ylim(0, 1.25 * max(r.tokens_per_second for r in results))
    right.yaxis.set_major_formatter(matplotlib.ticker.StrMethodFormatter("{x:,.0f}"))
    right.grid(axis="y", alpha=0.25)
    right.set_axisbelow(True)
    right.legend(frameon=False, ncols=len(drafters), loc="upper center")
    figure.supxlabel(caption, fontsize=8.5, color="#555555")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def write_texts(
    path: Path,
    prompts: list[tuple[str, bytes]],
    texts: dict[tuple[str, float], list[bytes]],
    modes: dict[float, str],
) -> None:
    """Each prompt with what was written after it in each way; equal texts are given once."""
    with path.open("w", encoding="utf-8") as file:
        for i, (name, prompt) in enumerate(prompts):
            file.write(f"{'=' * 100}\nprompt {i + 1}: {name}\n{'=' * 100}\n{_printable(prompt)}\n")
            for temperature, mode in modes.items():
                by_text: dict[bytes, list[str]] = {}
                for (drafter, t), written in texts.items():
                    if t == temperature:
                        by_text.setdefault(written[i], []).append(LABELS[drafter])
                for text, drafters in by_text.items():
                    file.write(f"{'-' * 20} {mode}: {', '.join(drafters)}\n{_printable(text)}\n")
            file.write("\n")


def _printable(text: bytes) -> str:
    return text.decode("utf-8", errors="replace")
