"""The examples of README.md run, and what it and the other documents point at is there."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest
import specdec_ops
import torch

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("[!.]*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("bench/*.md")])
FIGURES = re.compile(r"<!-- figures: (.*?) -->\n(.*?)<!-- /figures -->", re.DOTALL)
#: A duration, a rate or a ratio of speeds.
CLAIM = re.compile(
    r"\d\s?(?:µs|us|ms|ns|seconds|GB/s|tokens/s)\b"
    r"|\d times (?:faster|slower|as fast|as slow|as long)"
    r"|\d[x×](?!\w)"
)


def name_of(document: Path) -> str:
    return str(document.relative_to(ROOT))


def blocks(text: str, language: str) -> list[str]:
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [block for name, block in fenced if name == language]


@pytest.fixture(scope="module")
def readme() -> str:
    return (ROOT / "README.md").read_text()


@pytest.fixture(scope="module")
def ran(readme: str) -> tuple[list[dict[str, Any]], str]:
    """The names after each Python block, run one after the other, and what they printed."""
    printed, names, after = io.StringIO(), {"__name__": "readme"}, []
    with contextlib.redirect_stdout(printed):
        for block in blocks(readme, "python"):
            exec(compile(block, "README.md", "exec"), names)
            after.append(dict(names))
    return after, printed.getvalue()


def test_example_prints_what_the_readme_says(ran: tuple[list[dict[str, Any]], str], readme: str) -> None:
    _, printed = ran
    assert [printed] == blocks(readme, "text")


def test_example_of_a_batch_is_what_its_text_says(ran: tuple[list[dict[str, Any]], str]) -> None:
    out = ran[0][0]["out"]
    assert out.token_ids[0].tolist() == [1, 0, 2]
    assert out.num_accepted.tolist() == specdec_ops.count_accepted(out.token_ids).num_accepted.tolist()
    assert out.status.tolist() == [specdec_ops.Status.OK] * 2


def test_example_with_a_draft_model_is_an_exact_step(ran: tuple[list[dict[str, Any]], str]) -> None:
    names = ran[0][1]
    out, batch, k = names["out"], names["batch"], names["k"]
    assert out.token_ids.shape == (batch, k + 1)
    drafts = torch.stack([d.token_ids for d in names["drafts"]], dim=1)
    for r, accepted in enumerate(out.num_accepted.tolist()):
        assert out.token_ids[r, :accepted].equal(drafts[r, :accepted])
    arguments = {"draft_logits": names["draft_logits"].flatten(0, 1)}
    arguments |= {"seeds": names["seeds"], "positions": names["positions"]}
    again = specdec_ops.verify_chain(
        names["target_logits"], drafts.flatten(), torch.arange(batch + 1) * k, **arguments
    )
    assert out.token_ids.equal(again.token_ids)


def test_example_is_short(readme: str) -> None:
    assert len(blocks(readme, "python")[0].splitlines()) <= 13


def test_every_function_is_in_the_table_of_ops(readme: str) -> None:
    rows = re.findall(r"^\| `(\w+)` \|", readme, re.MULTILINE)
    functions = {name for name in specdec_ops.__all__ if name.islower()} - {
        "backend",
        "show_config",
        "warmup",
    }
    # An op in two forms has one row, under the name of the form that returns its outputs.
    assert sorted(rows) == sorted(n for n in functions if n.removesuffix("_") not in functions - {n})


def test_config_in_the_readme_has_the_lines_of_this_one(readme: str) -> None:
    (shown,) = (block for block in blocks(readme, "") if block.startswith("specdec_ops "))
    labels = [line[:15] for line in shown.splitlines()]
    assert labels == [line[:15] for line in specdec_ops.show_config().splitlines()]


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_links_lead_somewhere(document: Path) -> None:
    for link in re.findall(r"\]\(([^)#]+)\)", document.read_text()):
        assert link.startswith("https://") or (document.parent / link).exists(), link


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_make_targets_exist(document: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    command = r"(?:`|^|<!-- figures: (?:\w+=\w+ )?)make ([a-z-]+)"
    named = re.findall(command, document.read_text(), re.MULTILINE)
    assert set(named) <= targets


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_files_named_exist(document: Path) -> None:
    folders = "bench|csrc|docs|examples|python|tests|tools"
    for path in re.findall(rf"`((?:{folders})/[\w./-]+)`", document.read_text()):
        assert (ROOT / path).exists(), path


def test_every_status_has_its_row() -> None:
    text = (ROOT / "docs/numerics.md").read_text()
    last_cells = set(re.findall(r"\| `(\w+)` \|$", text, re.MULTILINE))
    assert last_cells == {status.name for status in specdec_ops.Status}


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_figures_are_given_with_their_command_alone(document: Path) -> None:
    text = document.read_text()
    assert len(FIGURES.findall(text)) == text.count("<!-- figures: ") - text.count("`<!-- figures: ")
    for command, figures in FIGURES.findall(text):
        assert re.search(r"\bmake [a-z-]+|\bpython -m \w+|\btools/\w+\.sh", command), command
        assert not figures.strip() or re.search(r"\bcores?\b|\bNVIDIA \w+", figures), "on which machine?"
    assert CLAIM.findall(FIGURES.sub("", text)) == []


@pytest.mark.parametrize(
    "claim", ["takes 43 us", "45 times faster", "at 13.9 GB/s", "1.8x over plain", "2.5× faster", "3 ms"]
)
def test_a_figure_elsewhere_would_be_seen(claim: str) -> None:
    assert CLAIM.search(f"It {claim}.")
    assert not CLAIM.search(FIGURES.sub("", f"<!-- figures: make bench -->\nIt {claim}.\n<!-- /figures -->"))
