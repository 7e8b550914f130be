"""Rules of verification: which kernel judges by them, and the checks of their arguments."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from specdec_ops.triton._chain import BLOCK, EXACT_MATCH, FLY, GUMBEL_NOISE, LOSSY, PLAIN, TOKEN_LEVEL
from specdec_ops.triton._checks import INT32_MAX
from specdec_ops.triton._lossy import LENIENCE, MARGIN, THRESHOLDS, TOP_N, TYPICAL

if TYPE_CHECKING:
    from specdec_ops.triton._chain_arguments import Chain

_LARGEST_ENTROPY_TOP_K = 64


class _Rule(NamedTuple):
    variant: int
    rule: int = TOKEN_LEVEL.value
    #: The range of each parameter.
    parameters: tuple[tuple[str, float, float], ...] = ()


_RULES = {
    "token": _Rule(PLAIN.value),
    "exact_match": _Rule(EXACT_MATCH.value),
    "block": _Rule(BLOCK.value),
    "lenience": _Rule(LOSSY.value, LENIENCE.value, (("factor", 2.0**-20, 1.0),)),
    "typical": _Rule(LOSSY.value, TYPICAL.value, (("epsilon", 0.0, 1.0), ("delta", 0.0, 1.0))),
    "top_n": _Rule(LOSSY.value, TOP_N.value, (("n", 1.0, 2.0**30), ("delta", 0.0, 1.0))),
    "thresholds": _Rule(LOSSY.value, THRESHOLDS.value, (("single", 0.0, 1.0), ("acc", 2.0**-20, 1.0))),
    "margin": _Rule(LOSSY.value, MARGIN.value, (("theta", 0.0, 1.0),)),
}


def _bits_of(value: float) -> int:
    """A float64 as kernels take it."""
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


def set_rule(chain: Chain, name: str, values: Sequence[float], mask: Tensor | None) -> None:
    """The rule by its name, where no other argument replaces it."""
    if name == "token" and not values and mask is None:
        return
    checks = chain.checks
    rule = _RULES.get(name)
    if rule is None:
        checks.fail(
            "rule must be 'token', 'block', 'exact_match' or one of specdec_ops.rules, got " + f"'{name}'"
        )
    count = len(rule.parameters)
    checks.require(
        len(values) == count,
        f"rule_parameters must have {count} elements for rule '{name}', got {len(values)}",
    )
    for (parameter, least, most), value in zip(rule.parameters, values, strict=True):
        checks.require(
            least <= value <= most,
            f"rule must have its {parameter} in [{least:g}, {most:g}], got {value:g}",
        )
    chain.rule, chain.variant = rule.rule, rule.variant
    first, second, *_ = (*values, 0.0, 0.0)
    if rule.rule == TOP_N.value:
        first = float(int(first))
    chain.rule_parameters = (_bits_of(first), _bits_of(second))
    if mask is None:
        return
    checks.require(
        chain.variant == LOSSY.value,
        f"rule_mask must be given with a lossy rule alone, got it with '{name}'",
    )
    checks.boolean(mask, "rule_mask")
    checks.vector(mask, "rule_mask", "[num_drafts]", chain.num_drafts)
    chain.add("rule_mask", mask)


def set_sampler(chain: Chain, sampler: str, has_uniforms: bool) -> None:
    """Gumbel noise needs a number for each id."""
    checks = chain.checks
    if sampler == "inverse_cdf":
        return
    checks.require(sampler == "gumbel", f"sampler must be 'inverse_cdf' or 'gumbel', got '{sampler}'")
    checks.require(not has_uniforms, "sampler must be 'inverse_cdf' with uniforms, got 'gumbel'")
    chain.variant = GUMBEL_NOISE.value


def set_fly(chain: Chain, window_size: int, entropy_threshold: float, entropy_top_k: int) -> None:
    require = chain.checks.require
    require(window_size >= 1, f"fly_window_size must be at least 1, got {window_size}")
    require(
        entropy_threshold >= 0.0,
        f"fly_entropy_threshold must be at least 0, got {entropy_threshold:g}",
    )
    require(
        1 <= entropy_top_k <= _LARGEST_ENTROPY_TOP_K,
        f"fly_entropy_top_k must be in [1, {_LARGEST_ENTROPY_TOP_K}], got {entropy_top_k}",
    )
    chain.variant = FLY.value
    chain.rule_parameters = (_bits_of(entropy_threshold), 0)
    chain.window, chain.entropy_top_k = min(window_size, INT32_MAX), entropy_top_k


def looks_at_draft_laws(chain: Chain, returns_accept_probs: bool) -> bool:
    """Whether the results depend on draft laws, so that somebody must read them."""
    if chain.rule in (TYPICAL.value, TOP_N.value, THRESHOLDS.value):
        return returns_accept_probs or "rule_mask" in chain.views
    return chain.variant not in (EXACT_MATCH.value, GUMBEL_NOISE.value)
