"""Fixtures and settings that every test shares."""

from __future__ import annotations

import os
import re
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
    "test_lossy_rules",
    "test_plan_verification",
    "test_random_numbers",
    "test_row_statistics",
    "test_sample",
    "test_sample_law",
    "test_sample_recovered",
    "test_token_logprobs",
    "test_verify_chain",
)


#: Tests of ops in Triton. What they expect of values that are wrong is not expected of it: it does not look.
TRITON_TESTS = (
    "test_advance_draft_step",
    "test_combine_sampled_and_draft_tokens",
    "test_compute_slot_mapping",
    "test_count_accepted",
    "test_count_emitted_and_rejected",
    "test_draft_vocabulary",
    "test_expand_dflash_inputs",
    "test_expand_draft_inputs",
    "test_expand_request_indices",
    "test_expand_to_drafts",
    "test_filters",
    "test_gather_draft_tokens",
    "test_logit_processors",
    "test_plan_verification",
    "test_prepare_next_tokens",
    "test_prepare_padded_draft_inputs",
    "test_prepare_positions_and_seq_lens",
    "test_row_statistics",
    "test_sample_law",
    "test_sample_recovered_probs",
    "test_token_logprobs",
    "test_update_num_computed_tokens",
    "test_update_request_state",
    "test_verify_argmax",
    "test_verify_probs",
)
NOT_FOR_THE_INTERPRETER = (
    "test_a_real_vocabulary",
    "test_acceptance_is_that_of_verify_chain",
    "test_bfloat16_rows_with_many_ties",
    "test_counts_what_verify_chain_emitted",
    "test_drawn_and_verified_tokens_have_the_law_of_the_target",
    "test_equal_rows_agree",
    "test_laws_of_the_likeliest_ids_over_the_target_s_vocabulary",
    "test_flushed_denormals_change_no_token",
    "test_logsumexp_is_that_of_sample",
    "test_matches_the_reference",
    "test_no_memory_is_left_behind_by_a_call",
    "test_seeds_draw_by_the_number_of_ids",
    "test_strides_and_offsets_do_not_matter",
    "test_the_draw_goes_by_the_law_that_is_handed_over[triton-interpreter-64]",
    "test_the_law_is_that_of_the_largest_logits",
    "test_verification_as_with_rows_that_are_cut",
    "test_verification_over_the_target_s_vocabulary",
)
#: Where it takes too long for most tests, those that it has time for.
FOR_THE_INTERPRETER = {
    "test_filters": (
        "test_a_draft_that_its_own_filters_leave_out",
        "test_each_request_has_filters_of_its_own",
        "test_errors",
        "test_greedy_requests_have_no_filters",
        "test_masses_are_whole_multiples_of_a_unit",
        "test_rows_without_a_law_are_as_without_filters",
    ),
}
ABOUT_VALUES = re.compile(
    r"never decrease|must not decrease|must (start|end) with|for request \d|for a request with|"
    r"\[num_outputs\] or longer|(context_\w+|hidden_state_mapping) must be \[num_tokens\]|"
    r"for draft id|must end within|at index \d|budget must be at least 0|step_costs must be positive"
)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    module = metafunc.module.__name__
    triton = [implementations.TRITON] if module in TRITON_TESTS else []
    if triton:
        implementations.require_triton()
    if "implementation" in metafunc.fixturenames:
        emulated = [implementations.EMULATED] if module in EMULATED_TESTS else []
        names = ["reference", *implementations.native_names(), *emulated, *triton]
        metafunc.parametrize("implementation", names, indirect=True)
    if "native" in metafunc.fixturenames:
        metafunc.parametrize("native", [*implementations.native_names(), *triton], indirect=True)
    if "default_native" in metafunc.fixturenames and "message" in metafunc.fixturenames:
        names = [implementations.loaded_native().name, *triton]
        metafunc.parametrize("default_native", names, indirect=True)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Gives tests of examples few of them where kernels are interpreted."""
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    test = getattr(item, "obj", None)
    settings = getattr(test, "_hypothesis_internal_use_settings", None)
    if settings is None or "triton-interpreter" not in parameters.values():
        return (yield)
    test._hypothesis_internal_use_settings = hypothesis.settings(settings, max_examples=8)
    try:
        return (yield)
    finally:
        test._hypothesis_internal_use_settings = settings


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    def expects_more_of_triton(item: pytest.Item) -> bool:
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        is_of_triton = parameters.get("default_native") == implementations.TRITON
        return is_of_triton and ABOUT_VALUES.search(parameters["message"]) is not None

    def is_not_for_the_interpreter(item: pytest.Item) -> bool:
        """It takes too long (a few seeds do), or sets flags of the processor, which are NumPy's too."""
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        is_left_out = parameters.get("seed", 0) >= 3 or item.name.startswith(NOT_FOR_THE_INTERPRETER)
        chosen = FOR_THE_INTERPRETER.get(item.module.__name__)
        is_left_out |= chosen is not None and not item.name.startswith(chosen)
        return is_left_out and "triton-interpreter" in parameters.values()

    reasons = (expects_more_of_triton, is_not_for_the_interpreter)
    items[:] = [item for item in items if not any(reason(item) for reason in reasons)]


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


@pytest.fixture
def native(request: pytest.FixtureRequest) -> Iterator[implementations.Implementation]:
    """Each native tier, and Triton."""
    with implementations.use(request.param) as selected:
        yield selected


@pytest.fixture
def default_native(request: pytest.FixtureRequest) -> Iterator[implementations.Implementation]:
    """The native kernels as they were loaded; where messages are expected, Triton too."""
    with implementations.use(getattr(request, "param", implementations.loaded_native().name)) as selected:
        yield selected


@pytest.fixture
def num_threads() -> Iterator[None]:
    """Restores torch's number of threads."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def triton() -> implementations.Implementation:
    """The ops in Triton, for tests that compare them with the native ones."""
    implementations.require_triton()
    return implementations.Implementation(implementations.TRITON)
