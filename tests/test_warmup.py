"""warmup: what it calls, on which device; and that no code but CUDA's own names a vendor's device."""

from __future__ import annotations

import ast
import contextlib
import inspect
import io
import itertools
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import specdec_ops
import torch
from specdec_ops.warmup import _OPS_ON_IDS, _OPS_ON_ROWS, _RULES, WarmupReport, _calls, warmup

#: The package has a function of this name, which hides the module.
MODULE = sys.modules["specdec_ops.warmup"]

ROOT = Path(__file__).parents[1]
ACCELERATOR = torch.accelerator.current_accelerator()
SIZES: dict[str, Any] = {"vocab_size": 50, "max_num_reqs": 64, "num_speculative_tokens": 3}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


#: Arguments that are numbers to a kernel, whatever their values.
NUMBERS = {"fly_entropy_threshold", "fly_entropy_top_k", "overflow_position", "pad_slot_id", "num_new_tokens"}
#: Of each a default would be made, or read from the device.
ALWAYS_GIVEN = {"temperature", "max_num_draft_tokens", "num_drafts", "token_dtype"}


def calls_of(op: Any, max_num_reqs: int = 2, rules: tuple[str, ...] = tuple(_RULES)) -> list[dict[str, Any]]:
    """The keyword arguments of every call that would warm up ``op``, with tensors of the CPU."""
    return list(_calls(op, torch.device("cpu"), (max_num_reqs, 3, 50), DTYPES, rules))


def kind(value: Any) -> Any:
    """What of an argument a compiler may look at."""
    return (value.dtype, value.shape) if isinstance(value, torch.Tensor) else value


OPS = [*_OPS_ON_ROWS, *_OPS_ON_IDS]
ops = pytest.mark.parametrize("op", OPS, ids=lambda op: op.__name__)


class TestCalls:
    def test_every_public_op_is_called(self) -> None:
        """A new op needs its entry in ``specdec_ops.warmup``; of two forms of it one is called."""
        public = (getattr(specdec_ops, name) for name in specdec_ops.__all__)
        functions = [
            f for f in public if inspect.isfunction(f) and f.__module__.startswith("specdec_ops.ops.")
        ]
        assert sorted({f.__name__.rstrip("_") for f in functions}) == sorted(
            f.__name__.rstrip("_") for f in OPS
        )
        assert set(OPS) <= set(functions)

    @ops
    def test_every_call_is_legal(self, op: Any) -> None:
        for arguments in calls_of(op, max_num_reqs=16):
            op(**arguments)

    @ops
    def test_every_argument_is_given_and_left_out(self, op: Any) -> None:
        """A new optional argument needs its place in the calls. Numbers compile to nothing of their own."""
        given = [set(arguments) for arguments in calls_of(op)]
        for name, parameter in inspect.signature(op).parameters.items():
            optional = parameter.default is not inspect.Parameter.empty
            assert name in NUMBERS or any(name in names for names in given), name
            if optional and name not in NUMBERS | ALWAYS_GIVEN:
                assert any(name not in names for names in given), name

    @ops
    def test_no_call_is_made_twice(self, op: Any) -> None:
        calls = [tuple((k, kind(v)) for k, v in sorted(c.items())) for c in calls_of(op, max_num_reqs=16)]
        assert len(calls) == len(set(calls))

    def test_laws_sources_rules_and_dtypes_are_all_combined(self) -> None:
        laws = ["draft_logits", "draft_logsumexp", "draft_probs", "draft_support_ids"]
        sources = ["seeds", "accept_uniforms"]
        rules = ["accept_rates", "fly_window_size", "rule"]
        seen = {
            (
                tuple(name for name in (*laws, *sources, *rules) if name in arguments),
                arguments["target_logits"].dtype,
                arguments["draft_token_ids"].dtype,
            )
            for arguments in calls_of(specdec_ops.verify_chain)
        }
        law_choices = [(), laws[:1], laws[:2], laws[2:3], laws[3:]]
        expected = {
            ((*law, *source, *rule), dtype, ids)
            for law, source, rule, dtype, ids in itertools.product(
                law_choices, [(), *([s] for s in sources)], [(), *([r] for r in rules)], DTYPES, INTEGERS
            )
            if (list(source), list(rule)) != ([], ["accept_rates"])
        }
        assert seen == expected

    @pytest.mark.parametrize(("most", "batches"), [(1, [1]), (2, [1, 2]), (15, [1, 2]), (16, [1, 2, 16])])
    def test_batches_up_to_the_largest(self, most: int, batches: list[int]) -> None:
        calls = calls_of(specdec_ops.count_accepted, max_num_reqs=most)
        assert sorted({arguments["token_ids"].shape[0] for arguments in calls}) == batches
        assert any("vocab_size" in arguments for arguments in calls)

    def test_rules_that_are_not_asked_for_are_not_called(self) -> None:
        calls = calls_of(specdec_ops.verify_chain, rules=("fly",))
        assert all("fly_window_size" in arguments for arguments in calls)
        assert all("accept_rates" not in arguments for arguments in calls)


INTEGERS = (torch.int64, torch.int32)


class TestDevices:
    def test_the_cpu_needs_nothing_and_says_so(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(MODULE, "_calls", lambda *_: pytest.fail("called"))
        report = warmup(device="cpu", **SIZES)
        assert report == WarmupReport(torch.device("cpu"), ())
        assert str(report) == "warm-up of cpu: not needed, its kernels are compiled ahead"

    @pytest.mark.parametrize("device", ["meta", *([str(ACCELERATOR)] if ACCELERATOR is not None else [])])
    def test_every_op_runs_on_another_device(self, device: str) -> None:
        state = torch.get_rng_state()
        report = warmup(device=device, dtypes=[torch.bfloat16], **SIZES)
        assert report.device.type == torch.device(device).type
        assert [each.op for each in report.ops] == [op.__name__ for op in OPS]
        assert all(each.num_calls >= 6 and each.seconds > 0 for each in report.ops)
        assert torch.equal(torch.get_rng_state(), state)
        total = sum(each.num_calls for each in report.ops)
        assert re.fullmatch(
            rf"warm-up of {device}.*:(\n  \w+ +\d+ calls +\d+\.\d+ s)+\n  all +{total} calls .* s",
            str(report),
        )

    def test_calls_are_made_on_the_device_of_the_tensors(self, monkeypatch: pytest.MonkeyPatch) -> None:
        devices = set()

        def op(**arguments: Any) -> None:
            devices.update(v.device for v in arguments.values() if isinstance(v, torch.Tensor))

        monkeypatch.setattr(MODULE, "_OPS_ON_ROWS", {op: _OPS_ON_ROWS[specdec_ops.verify_chain]})
        weights = torch.zeros(3, device="meta")
        assert warmup(weights, weights, device="meta", rules=tuple(_RULES), **SIZES).ops[0].op == "op"
        assert warmup(weights, **SIZES).device == torch.device("meta")
        assert devices == {torch.device("meta")}

    @pytest.mark.skipif(ACCELERATOR is None, reason="no device but the CPU")
    def test_a_device_without_an_index_agrees_with_tensors_of_any(self) -> None:
        last = torch.device(ACCELERATOR.type, torch.accelerator.device_count() - 1)
        current = torch.accelerator.current_device_index()
        report = warmup(torch.zeros(1, device=last), device=ACCELERATOR.type, dtypes=[torch.float32], **SIZES)
        assert report.device == last
        assert torch.accelerator.current_device_index() == current


class TestBadInput:
    @pytest.mark.parametrize(
        ("tensors", "arguments", "message"),
        [
            ([], {}, "device must be given, or tensors that are on it, got neither"),
            ([torch.zeros(1)], {"device": "meta"}, r"tensors\[0\] must be on meta, got one on cpu"),
            (
                [torch.zeros(1), torch.zeros(1, device="meta")],
                {},
                r"tensors\[1\] must be on cpu, got one on meta",
            ),
            (["cpu"], {}, r"tensors\[0\] must be a tensor, got str"),
            ([], {"device": "nowhere"}, "device must be one that torch has here, got 'nowhere'"),
            ([], {"device": "hpu:0"}, "device must be one that torch has here, got 'hpu:0'"),
            ([], {"device": "cpu", "vocab_size": 0}, "vocab_size must be a positive integer, got 0"),
            ([], {"device": "cpu", "max_num_reqs": -1}, "max_num_reqs must be a positive integer, got -1"),
            (
                [],
                {"device": "cpu", "num_speculative_tokens": 2.0},
                "num_speculative_tokens must be a positive integer, got 2.0",
            ),
            (
                [],
                {"device": "cpu", "dtypes": [torch.float64]},
                "dtypes must be among torch.float32, torch.bfloat16, torch.float16, got torch.float64",
            ),
            (
                [],
                {"device": "cpu", "rules": ["tree"]},
                "rules must be among token, synthetic, fly, block, exact_match, lossy, filters, got tree",
            ),
        ],
    )
    def test_arguments(self, tensors: list[Any], arguments: dict[str, Any], message: str) -> None:
        with pytest.raises(RuntimeError, match="warmup: " + message):
            warmup(*tensors, **(SIZES | arguments))


def vendor_names_in_python(source: str) -> Iterator[str]:
    """Uses of a vendor's device: its name as a string, or what torch has for it alone."""
    tree = ast.parse(source)
    texts = {
        id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)
    }  # docstrings and the like
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in texts:
            if re.search(r"\bcuda\b", node.value):
                yield f"line {node.lineno}: {node.value!r}"
        elif isinstance(node, ast.Attribute) and node.attr in ("cuda", "is_cuda"):
            # What a build of torch is for, and what vLLM asks its platforms.
            if ast.unparse(node.value) not in ("torch.version", "platform"):
                yield f"line {node.lineno}: {ast.unparse(node)}"
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names = [*(alias.name for alias in node.names), getattr(node, "module", None) or ""]
            if any(re.search(r"\bcuda\b", name) for name in names):
                yield f"line {node.lineno}: import of {names}"


def vendor_names_in_cpp(source: str) -> list[str]:
    return re.findall(
        r'"[^"\n]*\bcuda\b[^"\n]*"|\bk(?:CUDA|Cuda)\b|\bDeviceType::CUDA\b|\bcuda[A-Z]\w*\(', source
    )


class TestNoVendorIsNamed:
    def test_in_the_package(self) -> None:
        files = sorted((ROOT / "python/specdec_ops").rglob("*.py"))
        assert len(files) > 10
        found = {str(f): names for f in files if (names := list(vendor_names_in_python(f.read_text())))}
        assert found == {}

    def test_in_the_sources_outside_its_own_folder(self) -> None:
        own = ROOT / "csrc/cuda"
        files = [f for f in sorted((ROOT / "csrc").rglob("*")) if f.is_file() and own not in f.parents]
        assert len(files) > 10
        found = {str(f): names for f in files if (names := vendor_names_in_cpp(f.read_text()))}
        assert found == {}

    @pytest.mark.parametrize(
        "line",
        [
            "x.to('cuda')",
            "torch.device('cuda:0')",
            "torch.cuda.synchronize()",
            "t.cuda()",
            "t.is_cuda",
            "import torch.cuda",
            "from torch import cuda",
            "from torch.cuda import Stream",
            "f'cuda:{i}'",
        ],
    )
    def test_a_name_in_python_would_be_seen(self, line: str) -> None:
        assert list(vendor_names_in_python(f'"""A docstring on cuda."""\n{line}\n'))

    @pytest.mark.parametrize(
        "line",
        ["'''On cuda.'''", "torch.version.cuda", "platform.is_cuda()", "import specdec_ops._C_cuda"],
    )
    def test_what_names_no_device_passes(self, line: str) -> None:
        assert not list(vendor_names_in_python(line))

    @pytest.mark.parametrize(
        "line", ['f("cuda")', 'device("cuda:0")', "at::kCUDA", "DeviceType::CUDA", "cudaMalloc(&p, 4)"]
    )
    def test_a_name_in_cpp_would_be_seen(self, line: str) -> None:
        assert vendor_names_in_cpp(line)
        assert not vendor_names_in_cpp("// once for CPU and CUDA\n#if defined(__CUDACC__)\n")


def test_the_page_for_engines_prints_what_it_says() -> None:
    page = (ROOT / "docs/engines.md").read_text()
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {"__name__": "engines"}
    printed = []
    for language, block in blocks:
        if language == "python":
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(compile(block, "engines.md", "exec"), names)
            printed.append(out.getvalue())
    assert printed == [block for language, block in blocks if language == "text"]


def test_the_page_for_engines_has_every_rule_and_every_metric() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs/engines.md").read_text(), re.MULTILINE)
    assert rows == [*_RULES, *specdec_ops.AcceptanceSnapshot._fields]
