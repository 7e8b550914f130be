"""The floor: a plain loop that reads given rows once, with as many threads as torch has."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

_SOURCE = Path(__file__).with_name("read_loop.cpp")
_CACHE = Path(__file__).parents[1] / ".cache" / "bench"


def read_loop(rows: Sequence[Tensor]) -> Callable[[], object]:
    """A call that reads every byte of ``rows``, equally long and contiguous, once."""
    if not rows:
        return lambda: None
    native = _native()
    if native is None:
        return lambda: [row.amax() for row in rows]
    addresses = (ctypes.c_void_p * len(rows))(*(row.data_ptr() for row in rows))
    row_bytes = rows[0].numel() * rows[0].element_size()
    return functools.partial(native.read_rows, addresses, len(rows), row_bytes, torch.get_num_threads())


def kind() -> str:
    return "torch.amax" if _native() is None else "native"


@functools.cache
def _native() -> ctypes.CDLL | None:
    """The compiled loop, on torch's own OpenMP threads; None without a compiler."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    openmp = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))
    if compiler is None or not openmp:
        return None
    key = f"{_SOURCE.read_text()}{openmp[0]}{platform.processor()}{platform.node()}"
    stem = _CACHE / f"read_loop-{hashlib.sha256(key.encode()).hexdigest()[:12]}"
    library = stem.with_suffix(".so")
    if not library.exists():
        _CACHE.mkdir(parents=True, exist_ok=True)
        compiled, linked = stem.with_suffix(f".{os.getpid()}.o"), stem.with_suffix(f".{os.getpid()}.so")
        subprocess.run(
            [compiler, "-O3", "-march=native", "-fPIC", "-fopenmp", "-c", _SOURCE, "-o", compiled], check=True
        )
        # Linking torch's libgomp by path, not with -fopenmp, keeps one pool of threads in the process.
        subprocess.run([compiler, "-shared", compiled, openmp[0], "-o", linked], check=True)
        compiled.unlink()
        linked.rename(library)
    loaded = ctypes.CDLL(str(library))
    loaded.read_rows.restype = ctypes.c_uint64
    loaded.read_rows.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int]
    return loaded
