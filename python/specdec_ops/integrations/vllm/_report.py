"""What the plug-in replaced in this process, how often it ran, and what it handed over."""

from __future__ import annotations

import functools
import importlib
import logging
from collections import Counter
from typing import Any, NamedTuple


class Replacement(NamedTuple):
    """One function or kernel of the engine."""

    #: Qualified name in the engine.
    name: str
    replaced: bool
    #: Why it was not replaced; empty if it was.
    reason: str = ""


#: In the order in which they were tried, the newest try of each name.
replacements: dict[str, Replacement] = {}
#: Calls of what was replaced, by the function's name.
calls: Counter[str] = Counter()
#: Calls that went to the engine's own code, by the feature that is missing here.
handed_over: Counter[str] = Counter()


def record(name: str, reason: str = "") -> None:
    """Notes that ``name`` was replaced, or why it was not."""
    replacements[name] = Replacement(name, not reason, reason)


def hand_over(feature: str) -> None:
    """Notes a call that the engine's own code serves; logs the feature's first."""
    handed_over[feature] += 1
    if handed_over[feature] == 1:
        logger().info("specdec_ops has no %s: vLLM's own code serves these calls", feature)


@functools.cache
def warn_once(message: str) -> None:
    """Logs a warning the first time it is given."""
    logger().warning("%s", message)


def logger() -> Any:
    """A logger that vLLM's configuration covers."""
    try:
        return importlib.import_module("vllm.logger").init_logger("vllm.plugins.specdec_ops")
    except ImportError:
        return logging.getLogger("specdec_ops")
