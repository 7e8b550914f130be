"""Lossy rules for ``verify_chain(rule=...)``: more drafts are kept, and the target's law is bent.

Each says what it emits in one slot, where ``p`` is the target's law, ``q`` the drafter's and ``x`` the
draft. If the rule accepts ``x`` with probability ``a(x)``, and draws from ``r_x`` after a rejection, it
emits ``y`` with probability ``q(y) * a(y) + sum(q(x) * (1 - a(x)) * r_x(y) for x)``. Whatever the rule, that
differs from the target's law by a total variation of at least ``A - sum(min(p, q))``, where ``A = sum(q *
a)`` is its rate of acceptance; ``docs/rules.md`` has the laws.
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple, TypeAlias


class _Lenience(NamedTuple):
    factor: float


class Lenience(_Lenience):
    """Token level with ``p / factor`` in the place of ``p``: accepts if ``u * q * factor < p``.

    A rejected draft is replaced from the normalised ``max(p / factor - q, 0)``, so no token is emitted
    more than ``1 / factor`` times as often as it should be. A greedy request accepts what has at least
    ``factor`` times the largest probability, at temperature 1.

    Args:
        factor: In [2^-20, 1]; 1 is token level.

    Raises:
        RuntimeError: From ``verify_chain``, if ``factor`` is out of range.

    Source: Leviathan et al., arXiv 2211.17192, appendix A.5.

    Example:
        >>> from specdec_ops.rules import Lenience
        >>> Lenience(0.5)
        Lenience(factor=0.5)
    """

    name: ClassVar[str] = "lenience"
    __slots__ = ()


class _Typical(NamedTuple):
    epsilon: float = 0.09
    delta: float = 0.3


class Typical(_Typical):
    """Accepts if ``p(x) > min(epsilon, delta * exp(-H))``, where ``H`` is the entropy of ``p`` in nats.

    A rejected draft is replaced by the argmax of ``p``. No draft law is looked at. Greedy requests accept
    the argmax.

    Args:
        epsilon: In [0, 1].
        delta: In [0, 1]; the square root of ``epsilon`` by default.

    Raises:
        RuntimeError: From ``verify_chain``, if an argument is out of range.

    Source: typical acceptance of Medusa, Cai et al., arXiv 2401.10774.

    Example:
        >>> from specdec_ops.rules import Typical
        >>> Typical()
        Typical(epsilon=0.09, delta=0.3)
    """

    name: ClassVar[str] = "typical"
    __slots__ = ()


class _TopN(NamedTuple):
    n: int = 10
    delta: float = 0.6


class TopN(_TopN):
    """Accepts what is among the ``n`` most probable ids and at most ``delta`` below the largest probability.

    Ids that are as probable as the last of the ``n`` count too. A rejected draft is replaced by the
    argmax. Greedy requests are judged by ``p`` at temperature 1. With ``rule_mask`` it can be kept to the
    phase in which a model reasons, which may end between two drafts.

    Args:
        n: At least 1.
        delta: In [0, 1].

    Raises:
        RuntimeError: From ``verify_chain``, if an argument is out of range.

    Source: the relaxed acceptance of TensorRT-LLM (``relaxed_topk``, ``relaxed_delta``).

    Example:
        >>> from specdec_ops.rules import TopN
        >>> TopN(delta=0.3)
        TopN(n=10, delta=0.3)
    """

    name: ClassVar[str] = "top_n"
    __slots__ = ()


class _Thresholds(NamedTuple):
    single: float = 1.0
    acc: float = 1.0


class Thresholds(_Thresholds):
    """Accepts if ``p(x) >= single`` or ``u * acc < p(x)``.

    No draft law is looked at; a rejected draft is replaced from ``p`` without it. With both at 1 it is
    token level without a draft law. Greedy requests accept the argmax.

    Args:
        single: In [0, 1].
        acc: In [2^-20, 1].

    Raises:
        RuntimeError: From ``verify_chain``, if an argument is out of range.

    Source: SGLang (``speculative_accept_threshold_single``, ``speculative_accept_threshold_acc``), for a
    chain.

    Example:
        >>> from specdec_ops.rules import Thresholds
        >>> Thresholds(single=0.3)
        Thresholds(single=0.3, acc=1.0)
    """

    name: ClassVar[str] = "thresholds"
    __slots__ = ()


class _Margin(NamedTuple):
    theta: float = 0.9


class Margin(_Margin):
    """Token level, and accepts the two ids with the largest logits where these are close.

    Close are logits above 0 whose ratio, the second over the first, is above ``theta``. Adding a number
    to all logits changes the ratio: it is for models whose logits are used as they come.

    Args:
        theta: In [0, 1].

    Raises:
        RuntimeError: From ``verify_chain``, if ``theta`` is out of range.

    Source: MARS, arXiv 2601.15498.

    Example:
        >>> from specdec_ops.rules import Margin
        >>> Margin()
        Margin(theta=0.9)
    """

    name: ClassVar[str] = "margin"
    __slots__ = ()


LossyRule: TypeAlias = Lenience | Typical | TopN | Thresholds | Margin


def name_and_parameters(op: str, rule: str | LossyRule) -> tuple[str, tuple[float, ...]]:
    """What the ops call a rule, and the numbers that it comes with."""
    if isinstance(rule, str):
        return rule, ()
    if not isinstance(rule, Lenience | Typical | TopN | Thresholds | Margin):
        raise RuntimeError(f"{op}: rule must be a name or one of specdec_ops.rules, got {rule!r}")
    return rule.name, tuple(rule)
