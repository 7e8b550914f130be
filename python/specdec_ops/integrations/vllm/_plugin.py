"""What of vLLM is replaced, where, and the checks before."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import inspect
import logging
import os
import sys
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch

from specdec_ops.integrations.vllm import (
    _rejection_sampler,
    _report,
    drafting_kernels,
    runner,
    runner_sampling,
    sampling_kernels,
)

#: ``0`` leaves vLLM as it is, ``all`` also replaces ``runner_sampling.IF_ALL``; read when vLLM's platform
#: registers its kernels.
SWITCH = "SPECDEC_OPS_VLLM"
_HOOK = "register_triton_kernel_overrides"
_SAMPLER = "vllm.v1.sample.rejection_sampler"
_PROPOSER = "vllm.v1.spec_decode.llm_base_proposer"
_NO_TRITON = "vLLM's newer runner needs Triton, which has no driver here"
#: GPUs below have too little shared memory for float32 logits.
_LEAST_CAPABILITY = 80


def register() -> None:
    """Arranges for vLLM to use this package; vLLM calls it in each of its processes.

    Serves vLLM's CPU platform, and its CUDA platform where there are native kernels for the GPU. The
    replacements are made by :func:`install` right after the platform has registered its own kernels, which
    would otherwise undo them. Nothing heavy is imported before that, calling it
    again changes nothing, and whatever goes wrong is logged and leaves vLLM as it is.

    Example:
        >>> from specdec_ops.integrations import vllm
        >>> vllm.register()
    """
    if os.environ.get(SWITCH) == "0":
        return
    try:
        platform = importlib.import_module("vllm.platforms").current_platform
        if reason := _unserved(platform):
            if platform.is_cuda():
                _report.warn_once(f"vLLM runs as it is, since {reason}")
        else:
            _install_after_platform(type(platform))
    except Exception:
        _report.logger().exception("specdec_ops could not register; vLLM runs as it is")


def install() -> list[_report.Replacement]:
    """Replaces in this process what the signatures of the vLLM that is installed allow.

    Returns:
        What was replaced, and what was not and why. An engine that differs from the known ones
        (0.32 and 0.33) keeps its own code where it differs; nothing is raised.

    Example:
        >>> from specdec_ops.integrations import vllm
        >>> replaced = vllm.install()
    """
    groups = (
        _install_kernels,
        _install_rejection_sampler,
        _install_proposer,
        _install_runner,
        _install_runner_filters,
    )
    for group in groups:
        try:
            group()
        except Exception as error:
            name = group.__name__.removeprefix("_install_")
            _report.record(name, f"{type(error).__name__}: {error}")
            _report.logger().warning("specdec_ops did not replace the %s: %s", name, error)
    return list(_report.replacements.values())


def describe() -> str:
    """The functions of vLLM that are replaced, and those that are not, by reason.

    Returns:
        The text that ``python -m specdec_ops vllm`` prints. Installs the plug-in in this process, as
        vLLM's workers do.

    Example:
        >>> from specdec_ops.integrations import vllm
        >>> text = vllm.describe()
    """
    try:
        version = importlib.import_module("vllm").__version__
        platform = importlib.import_module("vllm.platforms").current_platform
    except ImportError as error:
        return f"vLLM cannot be imported: {error}"
    lines = [f"vLLM {version}, platform {platform.device_name}"]
    if os.environ.get(SWITCH) == "0":
        return "\n".join([*lines, f"nothing is replaced, since {SWITCH} is 0"])
    if reason := _unserved(platform):
        return "\n".join([*lines, f"nothing is replaced, since {reason}"])
    register()
    platform.register_triton_kernel_overrides()
    for reason, names in _names_by_reason().items():
        lines.append(f"not replaced, since {reason}:" if reason else f"replaced on {platform.device_name}:")
        lines += [f"  {name}" for name in names]
    return "\n".join(lines)


def _unserved(platform: Any) -> str:
    """Why nothing can be replaced on this platform; empty if something can."""
    if platform.is_cpu():
        return ""
    if not platform.is_cuda():
        return "the plug-in serves vLLM's platforms for CPU and CUDA"
    # What says so must not make a context on a GPU that is another process's.
    if not torch._C._dispatch_has_kernel_for_dispatch_key("specdec_ops::verify_chain", "CUDA"):
        return "specdec_ops has no native kernels for CUDA here (python -m specdec_ops)"
    if not platform.has_device_capability(_LEAST_CAPABILITY):
        return "the GPU's compute capability is below 8.0"
    return ""


def _names_by_reason() -> dict[str, list[str]]:
    """Names under what kept them from being replaced; first, under the empty string, those that were."""
    names: dict[str, list[str]] = {"": []}
    for replacement in _report.replacements.values():
        names.setdefault(replacement.reason, []).append(replacement.name)
    return {reason: of_reason for reason, of_reason in names.items() if of_reason}


def _install_after_platform(platform: Any) -> None:
    stock = inspect.getattr_static(platform, _HOOK, None)
    if stock is None:
        # Without the platform's own overrides there is nothing to come after.
        install()
        return
    if getattr(stock.__func__, "by_specdec_ops", False):
        return

    @functools.wraps(stock.__func__)
    def register_triton_kernel_overrides(cls: Any) -> None:
        stock.__func__(cls)
        install()

    register_triton_kernel_overrides.by_specdec_ops = True  # type: ignore[attr-defined]
    setattr(platform, _HOOK, classmethod(register_triton_kernel_overrides))


def _install_kernels() -> None:
    dispatcher = importlib.import_module("vllm.triton_utils.dispatcher")
    overrides = {}
    for name, candidates in {**sampling_kernels.KERNELS, **drafting_kernels.KERNELS}.items():
        try:
            stock = _resolve(name)
        except (ImportError, AttributeError) as error:
            _report.record(name, f"not in this vLLM ({error})")
            continue
        expected = _kernel_parameters(stock)
        for candidate in candidates if isinstance(candidates, tuple) else (candidates,):
            if tuple(inspect.signature(candidate).parameters) == expected:
                overrides[name] = candidate
                break
        else:
            _report.record(name, f"its parameters are ({', '.join(expected)})")
    _leave_out_of_warmup(set(overrides.values()))
    with _quiet(dispatcher.__name__):  # that the platform's kernels are replaced is what we want
        dispatcher.register_kernels(overrides)
    for name in overrides:
        _report.record(name)


def _leave_out_of_warmup(kernels: Collection[Callable[..., None]]) -> None:
    """Keeps launchers of our kernels from registering for the engine's warm-up.

    That compiles Triton kernels before the engine starts, and raises for anything else.
    """
    registry = importlib.import_module("vllm.model_executor.warmup.jit_warmup").JitWarmupRegistry
    stock = inspect.getattr_static(registry, "register").__func__
    stock = getattr(stock, "replaces", stock)

    @functools.wraps(stock)
    def register(cls: Any, kernel: Any, *args: Any, **kwargs: Any) -> None:
        if getattr(getattr(kernel, "kernel", None), "func", None) not in kernels:
            stock(cls, kernel, *args, **kwargs)

    register.replaces = stock  # type: ignore[attr-defined]
    registry.register = classmethod(register)


def _install_rejection_sampler() -> None:
    engine = importlib.import_module(_SAMPLER)
    sampler = engine.RejectionSampler
    _replace(engine, _SAMPLER, "rejection_sample", _rejection_sampler.make_rejection_sample(engine))
    owner = f"{_SAMPLER}.RejectionSampler"
    fields = {field.name for field in dataclasses.fields(engine.SamplingMetadata)}
    unknown = fields - _rejection_sampler.KNOWN_SAMPLING_METADATA
    if unknown:
        _report.record(f"{owner}.forward", f"SamplingMetadata has {', '.join(sorted(unknown))}")
    else:
        _replace(
            sampler, owner, "forward", _rejection_sampler.make_forward(engine, _stock(sampler, "forward"))
        )
    _replace(sampler, owner, "__init__", _rejection_sampler.make_init(_stock(sampler, "__init__")))


def _install_proposer() -> None:
    proposer = importlib.import_module(_PROPOSER).SpecDecodeBaseProposer
    init = _rejection_sampler.make_proposer_init(_stock(proposer, "__init__"))
    _replace(proposer, f"{_PROPOSER}.SpecDecodeBaseProposer", "__init__", init)


def _install_runner() -> None:
    has_triton = importlib.import_module("vllm.triton_utils").HAS_TRITON
    for name, importers in {**runner.IMPORTERS, **runner_sampling.IMPORTERS}.items():
        if not has_triton:
            _report.record(name, _NO_TRITON)
            continue
        if name in runner_sampling.IF_ALL and os.environ.get(SWITCH) != "all":
            _report.record(name, f"vLLM's own is mostly faster ({SWITCH}=all replaces it too)")
            continue
        owner_name, _, attribute = name.rpartition(".")
        try:
            stock = _stock(importlib.import_module(owner_name), attribute)
        except (ImportError, AttributeError) as error:
            _report.record(name, f"not in this vLLM ({error})")
            continue
        if name in runner.FUNCTIONS:
            ours, replacement = runner.FUNCTIONS[name], runner.bind(name, stock)
        else:
            ours = replacement = runner_sampling.FUNCTIONS[name](stock)
        if _accepts(ours, stock, name):
            # Modules that are imported later take it from its owner.
            for holder in (owner_name, *(module for module in importers if module in sys.modules)):
                _put(sys.modules[holder], attribute, replacement, stock)


def _install_runner_filters() -> None:
    verifier_name, sampler_name = runner_sampling.VERIFIER, runner_sampling.SAMPLER
    if not importlib.import_module("vllm.triton_utils").HAS_TRITON:
        _report.record(f"{verifier_name}._verify", _NO_TRITON)
        return
    make_context = _resolve(runner_sampling.CONTEXT)
    verifier, sampler = _resolve(verifier_name), _resolve(sampler_name)
    verify = runner_sampling.make_verify(_stock(verifier, "_verify"), make_context, sampler)
    _replace(verifier, verifier_name, "_verify", verify)
    if os.environ.get(SWITCH) == "all":
        sample = runner_sampling.make_sample(_stock(sampler, "sample"), make_context, sampler)
        _replace(sampler, sampler_name, "sample", sample)


def _replace(owner: Any, owner_name: str, attribute: str, ours: Callable[..., Any]) -> None:
    """Puts ours in the place of the engine's function if it takes every argument of it."""
    stock = _stock(owner, attribute)
    if _accepts(ours, stock, f"{owner_name}.{attribute}"):
        _put(owner, attribute, ours, stock)


def _accepts(ours: Callable[..., Any], stock: Callable[..., Any], name: str) -> bool:
    """Whether ours has the parameters of the engine's function; records the answer."""
    known = inspect.signature(ours).parameters
    missing = [parameter for parameter in inspect.signature(stock).parameters if parameter not in known]
    _report.record(name, f"it takes {', '.join(missing)}" if missing else "")
    return not missing


def _put(owner: Any, attribute: str, ours: Callable[..., Any], stock: Callable[..., Any]) -> None:
    ours.replaces = stock  # type: ignore[attr-defined]
    setattr(owner, attribute, ours)


def _stock(owner: Any, attribute: str) -> Callable[..., Any]:
    """The engine's own function, also where it was replaced before."""
    function = getattr(owner, attribute)
    return getattr(function, "replaces", function)  # type: ignore[no-any-return]


def _resolve(name: str) -> Any:
    """The object of a qualified name: of a module, or of a class in a module."""
    module_name, _, attribute = name.rpartition(".")
    try:
        owner: Any = importlib.import_module(module_name)
    except ModuleNotFoundError:
        module_name, _, class_name = module_name.rpartition(".")
        owner = getattr(importlib.import_module(module_name), class_name)
    return getattr(owner, attribute)


def _kernel_parameters(kernel: Any) -> tuple[str, ...]:
    """The parameters of a Triton kernel, of the plain function in its place, or of an override."""
    names = getattr(kernel, "arg_names", None)
    if names is None:
        names = inspect.signature(getattr(kernel, "func", kernel)).parameters
    return tuple(names)


@contextlib.contextmanager
def _quiet(name: str) -> Iterator[None]:
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
