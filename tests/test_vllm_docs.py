"""The feature matrix of docs/vllm.md: each cell names a test that is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FEATURES = (
    "greedy, sampling, seeded, n-gram, draft model, EAGLE, DFlash, synthetic, FLy, block, logprobs, grammar, "
    "filters, penalties"
)


def rows() -> list[list[str]]:
    """The cells of the matrix below its head."""
    lines = (
        (ROOT / "docs/vllm.md").read_text().partition("| | stock CPU |")[2].partition("\n\n")[0].splitlines()
    )
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def tests_of(*files: Path) -> set[str]:
    return {
        name for file in files for name in re.findall(r"^ *def (test_\w+)\(", file.read_text(), re.MULTILINE)
    }


WITH_VLLM = tests_of(*ROOT.glob("tests_vllm/test_*.py"))
ON_GPU = tests_of(ROOT / "tests/test_vllm_runner_sampling.py", ROOT / "tests_vllm/gpu_kernels.py")


def test_every_feature_has_a_row() -> None:
    assert [re.split(r"[ ,]*\(|,", row[0])[0] for row in rows()] == FEATURES.split(", ")


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0])
def test_every_cell_names_a_test(row: list[str]) -> None:
    for column, tests in zip(row[1:], (WITH_VLLM, WITH_VLLM, ON_GPU), strict=True):
        (name,) = re.findall(r"`(\w+)`", column)
        assert name in tests, name
