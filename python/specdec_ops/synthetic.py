"""Acceptance rates for ``verify_chain(accept_rates=...)``: an aid for benchmarks.

With them an engine runs as if its drafts were accepted at a given rate: the cost of a step and the
acceptance length are real, the text is not the target's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def conditional_acceptance_rates(rates: Sequence[float]) -> list[float]:
    """Turns rates by position into rates for a draft whose predecessors were accepted.

    Benchmarks report by position how often a draft is accepted at all, ``a[i]``; a draft is looked at only
    after all before it were accepted, so ``verify_chain`` needs ``c[i] = a[i] / a[i - 1]`` (``a[-1] = 1``; 0
    after a rate of 0).

    Args:
        rates: For each slot, the probability in [0, 1] that its draft and all before it are accepted. They do
            not increase.

    Returns:
        As many numbers in [0, 1].

    Raises:
        RuntimeError: A rate is NaN or outside [0, 1], or above the one before it.

    Source: the synthetic mode of vLLM 0.33.0 (``v1/spec_decode/utils.py``).

    Example:
        >>> from specdec_ops.synthetic import conditional_acceptance_rates
        >>> conditional_acceptance_rates([0.8, 0.4, 0.1, 0.0, 0.0])
        [0.8, 0.5, 0.25, 0.0, 0.0]
    """
    before, conditional = 1.0, []
    for i, rate in enumerate(rates):
        if not 0.0 <= rate <= 1.0:
            raise RuntimeError(
                f"conditional_acceptance_rates: rates must be in [0, 1], got {rate} at index {i}"
            )
        if rate > before:
            raise RuntimeError(
                f"conditional_acceptance_rates: rates must not increase, got {rate} after {before} "
                f"at index {i}"
            )
        conditional.append(rate / before if before > 0.0 else 0.0)
        before = float(rate)
    return conditional


def acceptance_rates_for_length(acceptance_length: float, num_speculative_tokens: int) -> list[float]:
    """Rates by position whose acceptance length has a given mean and the least variance.

    A request emits its accepted drafts and one more token. The first ``floor(length - 1)`` drafts are always
    accepted, the next one with the fraction that is left, the others never.

    Args:
        acceptance_length: Mean number of tokens a request emits in a step, in ``[1, num_speculative_tokens +
            1]``.
        num_speculative_tokens: Number of slots, at least 0.

    Returns:
        ``num_speculative_tokens`` rates for :func:`conditional_acceptance_rates`.

    Raises:
        RuntimeError: An argument is out of its range.

    Source: the option ``synthetic_acceptance_length`` of vLLM 0.33.0 (``config/speculative.py``). SGLang's
    ``SGLANG_SIMULATE_ACC_LEN`` with the method ``match-expected`` has the same lengths; TensorRT-LLM's
    ``TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS`` is ``acceptance_length - 1``.

    Example:
        >>> import torch
        >>> from specdec_ops.synthetic import acceptance_rates_for_length, conditional_acceptance_rates
        >>> rates = acceptance_rates_for_length(2.75, 4)
        >>> rates
        [1.0, 0.75, 0.0, 0.0]
        >>> accept_rates = torch.tensor(conditional_acceptance_rates(rates))  # for verify_chain
    """
    _check_length("acceptance_rates_for_length", acceptance_length, num_speculative_tokens)
    always = math.floor(acceptance_length - 1)
    rates = [1.0] * always + [0.0] * (num_speculative_tokens - always)
    if always < num_speculative_tokens:
        rates[always] = acceptance_length - 1 - always
    return rates


def acceptance_rates_for_constant_rate(acceptance_length: float, num_speculative_tokens: int) -> list[float]:
    """Rates by position whose acceptance length has a given mean, each draft being accepted with one rate.

    The rates are ``c, c**2, c**3, ...``, as if drafts were accepted independently of where they stand: the
    lengths spread as they do with a real drafter, more than with :func:`acceptance_rates_for_length`.

    Args:
        acceptance_length: Mean number of tokens a request emits in a step, in ``[1, num_speculative_tokens +
            1]``.
        num_speculative_tokens: Number of slots, at least 0.

    Returns:
        ``num_speculative_tokens`` rates for :func:`conditional_acceptance_rates`.

    Raises:
        RuntimeError: An argument is out of its range.

    Source: ``c + c^2 + ... = length - 1``, solved by bisection.

    Example:
        >>> from specdec_ops.synthetic import acceptance_rates_for_constant_rate
        >>> acceptance_rates_for_constant_rate(1.75, 2)
        [0.5, 0.25]
    """
    _check_length("acceptance_rates_for_constant_rate", acceptance_length, num_speculative_tokens)
    low, high = 0.0, 1.0
    while low < (middle := (low + high) / 2) < high:
        if sum(middle**i for i in range(1, num_speculative_tokens + 1)) < acceptance_length - 1:
            low = middle
        else:
            high = middle
    return [high**i for i in range(1, num_speculative_tokens + 1)]


def acceptance_rates_for_normal_length(acceptance_length: float, num_speculative_tokens: int) -> list[float]:
    """Rates by position whose acceptance length is a normal number with deviation 1, rounded and clamped.

    Clamping to ``[1, num_speculative_tokens + 1]`` moves the mean where ``acceptance_length`` is near an end.

    Args:
        acceptance_length: Mean of the normal number, in ``[1, num_speculative_tokens + 1]``.
        num_speculative_tokens: Number of slots, at least 0.

    Returns:
        ``num_speculative_tokens`` rates for :func:`conditional_acceptance_rates`.

    Raises:
        RuntimeError: An argument is out of its range.

    Source: the method ``multinomial`` of SGLang's simulated acceptance, which draws one for a batch; here
    each request has its own.

    Example:
        >>> from specdec_ops.synthetic import acceptance_rates_for_normal_length
        >>> [round(rate, 3) for rate in acceptance_rates_for_normal_length(2.5, 3)]
        [0.841, 0.5, 0.159]
    """
    _check_length("acceptance_rates_for_normal_length", acceptance_length, num_speculative_tokens)
    return [
        0.5 * math.erfc((i + 0.5 - acceptance_length) / math.sqrt(2))
        for i in range(1, num_speculative_tokens + 1)
    ]


def _check_length(function: str, acceptance_length: float, num_speculative_tokens: int) -> None:
    if num_speculative_tokens < 0:
        raise RuntimeError(
            f"{function}: num_speculative_tokens must be at least 0, got {num_speculative_tokens}"
        )
    if not 1.0 <= acceptance_length <= num_speculative_tokens + 1:
        raise RuntimeError(
            f"{function}: acceptance_length must be in [1, num_speculative_tokens + 1] = "
            f"[1, {num_speculative_tokens + 1}], got {acceptance_length}"
        )
