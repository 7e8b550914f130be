"""Fixtures and settings that every test shares."""

from __future__ import annotations

import os
from collections.abc import Iterator

import hypothesis
import pytest
import torch

if not torch.cuda.is_available():
    # Before anything imports Triton: without a GPU its kernels are interpreted.
    os.environ.setdefault("TRITON_INTERPRET", "1")

import implementations

pytest.register_assert_rewrite("margins")

hypothesis.settings.register_profile(
    "ci",
    derandomize=True,
    max_examples=100,
    deadline=None,
    suppress_health_check=[
        hypothesis.HealthCheck.too_slow,
        hypothesis.HealthCheck.data_too_large,
        hypothesis.HealthCheck.function_scoped_fixture,
    ],
)
hypothesis.settings.load_profile("ci")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: takes minutes; run with -m slow")
    if not config.option.markexpr:
        config.option.markexpr = "not slow"


#: Tests of ops that are quick enough for an emulated GPU.
EMULATED_TESTS = (
    "test_bonus_token_ids",
    "test_draft_vocabulary",
    "test_exact_match",
    "test_filters",
    "test_logit_processors",
    "test_plan_verification",
    "test_random_numbers",
    "test_row_statistics",
    "test_sample",
    "test_sample_recovered",
    "test_token_logprobs",
    "test_verify_chain",
)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "implementation" in metafunc.fixturenames:
        names = ["reference", *implementations.native_names()]
        if metafunc.module.__name__ in EMULATED_TESTS:
            names.append(implementations.EMULATED)
        metafunc.parametrize("implementation", names, indirect=True)


@pytest.fixture
def implementation(request: pytest.FixtureRequest) -> Iterator[implementations.Implementation]:
    """Each implementation that is present, the float64 reference among them."""
    with implementations.use(request.param) as selected:
        yield selected


@pytest.fixture(params=["reference", *implementations.native_cpu_names()])
def cpu_implementation(request: pytest.FixtureRequest) -> Iterator[implementations.Implementation]:
    """Those for tensors in host memory, where ops look at values and take requests in order."""
    with implementations.use(request.param) as selected:
        yield selected


@pytest.fixture(params=implementations.native_names())
def native(request: pytest.FixtureRequest) -> Iterator[implementations.Implementation]:
    """Each native tier."""
    with implementations.use(request.param) as selected:
        yield selected


@pytest.fixture
def default_native() -> implementations.Implementation:
    """The native kernels as they were loaded."""
    return implementations.loaded_native()


@pytest.fixture
def num_threads() -> Iterator[None]:
    """Restores torch's number of threads."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
