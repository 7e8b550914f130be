"""Text that every machine has: the source of Python's standard library."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import numpy as np

#: Modules kept out of training; prompts and validation text come from them.
HELD_OUT = (
    "bisect.py",
    "configparser.py",
    "csv.py",
    "fractions.py",
    "graphlib.py",
    "heapq.py",
    "json/decoder.py",
    "queue.py",
    "sched.py",
    "shelve.py",
    "textwrap.py",
    "zipapp.py",
)

#: Folders left out of training: tests, tables of data, and packages that are not part of the library.
SKIPPED_FOLDERS = frozenset(
    {"__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}
)


def library_path() -> Path:
    """The folder of the standard library's source."""
    return Path(sysconfig.get_paths()["stdlib"])


def training_text() -> np.ndarray:
    """All training files in sorted order as one array of bytes."""
    root = library_path()
    parts = []
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if SKIPPED_FOLDERS.isdisjoint(relative.parts) and relative.as_posix() not in HELD_OUT:
            parts.append(path.read_bytes() + b"\n\n")
    return np.frombuffer(b"".join(parts), dtype=np.uint8)


def held_out_text() -> np.ndarray:
    """The held-out files as one array of bytes."""
    return np.frombuffer(
        b"\n\n".join((library_path() / name).read_bytes() for name in HELD_OUT), dtype=np.uint8
    )


def held_out_prompts(count: int, length: int) -> list[tuple[str, bytes]]:
    """Prompts of ``length`` bytes from the held-out files, each from the start of a definition.

    Files are taken in turn; the second round takes the next definition of each, and so on.

    Args:
        count: How many prompts.
        length: Bytes of each prompt.

    Returns:
        Pairs of a name (module and line) and the prompt's bytes.
    """
    root = library_path()
    candidates: list[list[tuple[str, bytes]]] = []
    for name in HELD_OUT:
        text = (root / name).read_bytes()
        found = []
        start = text.find(b"\n    def ", len(text) // 3)
        while start >= 0 and start + 1 + length <= len(text):
            line = text.count(b"\n", 0, start + 1) + 1
            found.append((f"{name}:{line}", text[start + 1 : start + 1 + length]))
            start = text.find(b"\n    def ", start + length)
        candidates.append(found)
    prompts = [entry for group in _rounds(candidates) for entry in group]
    if len(prompts) < count:
        raise ValueError(
            f"count: the held-out files have {len(prompts)} prompts of {length} bytes, not {count}"
        )
    return prompts[:count]


def _rounds(candidates: list[list[tuple[str, bytes]]]) -> list[list[tuple[str, bytes]]]:
    depth = max(len(found) for found in candidates)
    return [[found[i] for found in candidates if i < len(found)] for i in range(depth)]
