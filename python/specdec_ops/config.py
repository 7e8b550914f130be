"""What this installation has: version, backends, instruction-set tier."""

from __future__ import annotations

import importlib

import torch

from specdec_ops import _library, triton


def show_config() -> str:
    """Describes this installation, one fact a line: what a bug report needs.

    Returns:
        The version, the backend that serves each kind of tensor (``SPECDEC_OPS_BACKEND`` forces one), the
        CPU's instruction-set tier in use (``SPECDEC_OPS_CPU_ISA`` caps it) and those available, torch's
        number of threads, torch's version, the CUDA version that torch was built for, and Triton's version
        and the device that its driver is for.

    Raises:
        ImportError: A native module is installed but cannot be loaded.

    Example:
        >>> import specdec_ops
        >>> print(specdec_ops.show_config().splitlines()[0])
        specdec_ops 0.1.0
    """
    import specdec_ops

    backends = _library.load_backends()
    facts = {f"{device} tensors": backend for device, backend in backends.items()}
    if backends.get("cpu") == "native":
        native = importlib.import_module("specdec_ops._C")
        facts["CPU tier"] = f"{native.cpu_isa()} (available: {', '.join(native.available_cpu_isas())})"
    facts["threads"] = str(torch.get_num_threads())
    facts["torch"] = torch.__version__
    facts["CUDA"] = torch.version.cuda or "none: torch was built without it"
    facts["Triton"] = triton.describe()
    lines = [f"  {name:<12} {value}" for name, value in facts.items()]
    return "\n".join([f"specdec_ops {specdec_ops.__version__}", *lines])
