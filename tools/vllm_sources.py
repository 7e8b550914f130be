"""vLLM's sampling code from an unpacked source distribution, where vLLM cannot be installed.

``load(sources)`` makes ``import vllm`` find the modules named here in their files, and a stand-in for every
other module of vLLM. They need torch and Triton alone.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

#: What comes from its file, where a version has it.
MODULES = frozenset(
    (
        "vllm.model_executor.layers.utils",
        "vllm.model_executor.warmup.jit_warmup",
        "vllm.model_executor.warmup.jit_warmup_triton_helper",
        "vllm.triton_utils.dispatcher",
        "vllm.utils.gpu_sync_debug",
        "vllm.utils.math_utils",
        "vllm.utils.torch_utils",
        "vllm.utils.torch_version",
        "vllm.v1.outputs",
        "vllm.v1.sample.logits_processor",
        "vllm.v1.sample.logits_processor.builtin",
        "vllm.v1.sample.logits_processor.interface",
        "vllm.v1.sample.logits_processor.state",
        "vllm.v1.sample.metadata",
        "vllm.v1.sample.ops.bad_words",
        "vllm.v1.sample.ops.logprobs",
        "vllm.v1.sample.ops.penalties",
        "vllm.v1.sample.ops.topk_topp_sampler",
        "vllm.v1.sample.ops.topk_topp_triton",
        "vllm.v1.sample.rejection_sampler",
        "vllm.v1.sample.sampler",
        "vllm.v1.spec_decode.fly",
        "vllm.v1.spec_decode.metadata",
        "vllm.v1.spec_decode.utils",
        "vllm.v1.watermarking",
        "vllm.v1.watermarking.detector",
        "vllm.v1.watermarking.factory",
        "vllm.v1.watermarking.gumbel",
        "vllm.v1.watermarking.prfs",
        "vllm.v1.watermarking.prfs.base",
        "vllm.v1.watermarking.prfs.philox",
        "vllm.v1.watermarking.spec_decode",
        "vllm.v1.watermarking.watermarker",
        "vllm.v1.worker.block_table",
        "vllm.v1.worker.gpu.input_batch",
        "vllm.v1.worker.gpu.sample.gumbel",
        "vllm.v1.worker.gpu.sample.logits_processor.interface",
        "vllm.v1.worker.gpu.sample.sampler",
        "vllm.v1.worker.gpu.sample.watermark",
        "vllm.v1.worker.gpu.spec_decode.rejection_sampler",
        "vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils",
    )
)


class StandIn(type):
    """A class that may be called, indexed, derived from and asked for any attribute."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return stand_in(name)

    def __getitem__(cls, key: Any) -> StandIn:
        return cls

    def __iter__(cls) -> Iterator[Any]:
        return iter(())

    def __call__(cls, *args: Any, **kwargs: Any) -> StandIn:
        return cls


def stand_in(name: str) -> StandIn:
    return StandIn(name, (), {})


class StandInModule(types.ModuleType):
    """A module that has whatever it is asked for."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, stand_in(name))
        return self.__dict__[name]


class Platform:
    """The engine's platform on a machine with a GPU of NVIDIA, or on one without any."""

    device_type = device_name = "cuda" if torch.cuda.is_available() else "cpu"
    dispatch_key = device_type.upper()
    simple_compile_backend = "eager"

    def is_cuda(self) -> bool:
        return self.device_type == "cuda"

    is_cuda_alike = is_cuda

    def is_cpu(self) -> bool:
        return self.device_type == "cpu"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("is_"):
            return lambda: False
        raise AttributeError(name)

    def has_device_capability(self, capability: int) -> bool:
        major, minor = torch.cuda.get_device_capability()
        return 10 * major + minor >= capability

    @classmethod
    def register_triton_kernel_overrides(cls) -> None:
        """A platform for GPUs has none."""


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, sources: Path) -> None:
        self._sources = sources

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] != "vllm":
            return None
        place = self._sources / name.replace(".", "/")
        if name in MODULES:
            file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
            if not file.exists():
                return None
            folders = [str(place)] if place.is_dir() else None
            return importlib.util.spec_from_file_location(name, file, submodule_search_locations=folders)
        return importlib.machinery.ModuleSpec(name, self, origin=str(place / "__init__.py"), is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return StandInModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing is run."""


def _num_compute_units(device: int = 0) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if torch.cuda.is_available() else 1


def load(sources: Path) -> None:
    """Makes ``import vllm`` work with the sources in a folder.

    Args:
        sources: An unpacked source distribution, such as ``vllm-0.33.0``.
    """
    import triton
    from triton import language
    from triton.language.extra import libdevice

    if not (sources / "vllm").is_dir():
        raise FileNotFoundError(f"{sources} holds no sources of vLLM")
    sys.meta_path.insert(0, _Finder(sources))
    vllm: Any = importlib.import_module("vllm")
    vllm.__version__ = sources.name.rpartition("-")[2]
    platforms: Any = importlib.import_module("vllm.platforms")
    platforms.current_platform = Platform()
    platform_utils: Any = importlib.import_module("vllm.utils.platform_utils")
    platform_utils.is_pin_memory_available = lambda: False
    platform_utils.num_compute_units = _num_compute_units
    triton_utils: Any = importlib.import_module("vllm.triton_utils")
    triton_utils.triton, triton_utils.tl, triton_utils.tldevice = triton, language, libdevice
    triton_utils.HAS_TRITON = True
