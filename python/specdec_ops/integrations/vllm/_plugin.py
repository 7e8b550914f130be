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
from collections.abc import Callable, Iterator
from typing import Any

from specdec_ops.integrations.vllm import (
    _rejection_sampler,
    _report,
    drafting_kernels,
    runner,
    sampling_kernels,
)

SWITCH = "SPECDEC_OPS_VLLM"
_HOOK = "register_triton_kernel_overrides"
_SAMPLER = "vllm.v1.sample.rejection_sampler"


def register() -> None:
    """Arranges for vLLM on CPU to use this package; vLLM calls it in each of its processes.

    The replacements are made by :func:`install` right after vLLM's CPU platform has registered its
    own kernels, which would otherwise undo them. Nothing heavy is imported before that, calling it
    again changes nothing, and whatever goes wrong is logged and leaves vLLM as it is.

    Example:
        >>> from specdec_ops.integrations import vllm
        >>> vllm.register()
    """
    if os.environ.get(SWITCH) == "0":
        return
    try:
        platform = importlib.import_module("vllm.platforms").current_platform
        if platform.is_cpu():
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
    for group in (_install_kernels, _install_rejection_sampler, _install_runner):
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
    if not platform.is_cpu():
        return "\n".join([*lines, "nothing is replaced, since the plug-in serves vLLM's CPU platform"])
    register()
    platform.register_triton_kernel_overrides()
    for reason, names in _names_by_reason().items():
        lines.append(f"not replaced, since {reason}:" if reason else "replaced:")
        lines += [f"  {name}" for name in names]
    return "\n".join(lines)


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
    with _quiet(dispatcher.__name__):  # that the platform's kernels are replaced is what we want
        dispatcher.register_kernels(overrides)
    for name in overrides:
        _report.record(name)


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
    if hasattr(engine, "compute_fly_entropy"):
        _replace(sampler, owner, "__init__", _rejection_sampler.make_init(_stock(sampler, "__init__")))


def _install_runner() -> None:
    has_triton = importlib.import_module("vllm.triton_utils").HAS_TRITON
    for name, ours in runner.FUNCTIONS.items():
        if not has_triton:
            _report.record(name, "vLLM's newer runner needs Triton, which has no driver for the CPU")
            continue
        owner_name, _, attribute = name.rpartition(".")
        owner = importlib.import_module(owner_name)
        stock = _stock(owner, attribute)
        if _accepts(ours, stock, name):
            replacement = runner.bind(name, stock)
            # Modules that are imported later take it from its owner.
            for holder in (owner_name, *(m for m in runner.IMPORTERS[name] if m in sys.modules)):
                _put(sys.modules[holder], attribute, replacement, stock)


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
