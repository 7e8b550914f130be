"""Why a request or a row got the token it got."""

from __future__ import annotations

import enum


class Status(enum.IntEnum):
    """What verification or sampling found in a request (docs/numerics.md has the results).

    Everything but ``OK`` is data that a model can produce, not an error: the op still returns a
    valid token id, or -1 for a bonus token that the caller gave and that is none.

    Example:
        >>> from specdec_ops import Status
        >>> Status(2).name
        'MASKED_TARGET'
    """

    OK = 0
    #: A target row that decided the request holds a NaN or +inf.
    NON_FINITE_TARGET = 1
    #: A target row that decided the request has no finite logit: every id is masked.
    MASKED_TARGET = 2
    #: The draft law of the rejected position is not finite, or cannot have produced the draft (q = 0):
    #: the draft was judged as one-hot, which is exact for every drafter. Or another entry of it that the
    #: draw of the recovered token consulted is not finite: that token comes from the target law.
    UNUSABLE_DRAFT_LAW = 3
    #: A draft id, or a bonus id that the caller gave, lies outside ``[0, vocab_size)`` and is not the
    #: padding -1.
    INVALID_DRAFT_ID = 4
