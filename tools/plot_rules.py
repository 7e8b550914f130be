"""Draws docs/acceptance.svg: how many drafts each lossless rule accepts, against how far the drafter is off.

Exact: every path of k drafts is enumerated, and the means of the rules are sums over paths. The target's
and the drafter's laws are random, the same in every slot; the drafter's is the target's, tilted until it
has the wanted distance.

    python tools/plot_rules.py
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path

import matplotlib as mpl
import numpy as np
import numpy.typing as npt

mpl.use("svg")
import matplotlib.pyplot as plt

Array = npt.NDArray[np.float64]
VOCAB_SIZE = 5
K = 4
NUM_MODELS = 40


def distance(p: Array, q: Array) -> float:
    return float(np.abs(p - q).sum() / 2)


def tilted(p: Array, direction: Array, wanted: float) -> Array:
    """The law ``p * exp(s * direction)``, normalised, at the wanted distance from p."""
    low, high = 0.0, 1e3
    for _ in range(100):
        s = (low + high) / 2
        logits = np.log(p) + s * direction
        q = np.exp(logits - logits.max())
        q /= q.sum()
        low, high = (s, high) if distance(p, q) < wanted else (low, s)
    return q


def accepted_in_turn(rate: float) -> float:
    return sum(rate**i for i in range(1, K + 1))


def token_level(p: Array, q: Array) -> float:
    return accepted_in_turn(float(np.minimum(p, q).sum()))


def block(p: Array, q: Array) -> float:
    """The sum over paths of the chances P of their drafts."""
    mean = 0.0
    for path in itertools.product(range(VOCAB_SIZE), repeat=K):
        chance, drawn = 1.0, 1.0
        chances = 0.0
        for x in path:
            drawn *= q[x]
            chance = min(1.0, chance * p[x] / q[x])
            chances += chance
        mean += drawn * chances
    return mean


def shared_noise(p: Array, q: Array) -> float:
    return accepted_in_turn(sum(1 / np.maximum(p / p[v], q / q[v]).sum() for v in range(VOCAB_SIZE)))


def exact_match(p: Array, q: Array) -> float:
    return accepted_in_turn(float((p * q).sum()))


RULES = {
    "block": block,
    "token": token_level,
    "exact match, shared Gumbel noise": shared_noise,
    "exact match, independent": exact_match,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--output", type=Path, default=Path(__file__).parents[1] / "docs" / "acceptance.svg")
    output: Path = parser.parse_args().output
    random = np.random.default_rng(1)
    targets = random.dirichlet(np.full(VOCAB_SIZE, 2.0), NUM_MODELS)
    # The direction points to the least probable id, so that every distance below 1 - min(p) is reached.
    directions = random.normal(size=(NUM_MODELS, VOCAB_SIZE))
    for p, direction in zip(targets, directions, strict=True):
        direction[p.argmin()] = direction.max() + 1.0
    distances = np.linspace(0.0, 0.75, 16)
    mpl.rcParams.update({"svg.hashsalt": "specdec_ops", "svg.fonttype": "none", "font.size": 10})
    figure, axes = plt.subplots(figsize=(6.4, 4.0))
    for name, rule in RULES.items():
        means = [
            np.mean(
                [rule(p, tilted(p, d, wanted)) for p, d in zip(targets, directions, strict=True)],
            )
            for wanted in distances
        ]
        axes.plot(distances, means, label=name)
    axes.set_xlabel("total variation between drafter and target")
    axes.set_ylabel(f"mean number of accepted drafts of {K}")
    axes.set_xlim(0, distances[-1])
    axes.set_ylim(0, K)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(output, metadata={"Date": None, "Creator": None})


if __name__ == "__main__":
    main()
