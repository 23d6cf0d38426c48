"""`make test` leaves out what is marked `slow`, and no law: each runs there over every policy.

A law's further rows, a kernel's further cases and whole runs are left to `make test-all`. Here the
laws, the contract of the policies and the tests of the kernels are collected: what a test function
is about in all of its instances (policies, forms of a kernel, dtypes) is there in those that are
not slow, too.
"""

import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from tests.support.instances import first_of_each, further, nightly_but

ROOT = Path(__file__).resolve().parent.parent
GUARDED = ("tests/laws", "tests/policies/test_policies.py", "tests/pallas_kernels")
# Whole test functions that only `make test-all` runs, and why.
ONLY_SLOW = {
    "tests/laws/test_a_new_policy.py::test_the_page_leads_to_the_end": "runs pytest in a copy of "
    "the tree, 30 s; the policy of the page is under the laws in this file's other tests",
    **dict.fromkeys(
        [
            "tests/laws/test_compiled_steps.py::test_no_copy_of_the_pool_in_a_decode_chunk_on_tpu",
            "tests/laws/test_compiled_steps.py::test_no_copy_of_the_pool_in_a_decode_chunk_for_gpus",
            "tests/laws/test_compiled_steps.py::"
            "test_no_copy_of_the_pool_where_sequences_are_copied_on_tpu",
            "tests/laws/test_compiled_steps.py::"
            "test_no_copy_of_the_pool_in_a_chunk_of_prompts_for_gpus",
            "tests/laws/test_compiled_steps.py::"
            "test_no_copy_of_the_pool_in_a_chunk_of_prompts_on_tpu",
            "tests/laws/test_compiled_steps.py::test_programs_do_not_grow_with_depth",
        ],
        "compiles steps and prompts of policies ahead of time in a process of its own, 180 s",
    ),
    **dict.fromkeys(
        [
            "tests/pallas_kernels/decode/test_tpu_compiles.py::test_kernel_compiles",
            "tests/pallas_kernels/select/test_tpu_compiles.py::test_kernel_compiles",
            "tests/pallas_kernels/update/test_tpu_compiles.py::test_kernel_compiles",
            "tests/pallas_kernels/prefill/test_prefill.py::test_tpu_kernel_compiles",
            "tests/pallas_kernels/training/test_kernels.py::test_tpu_kernels_compile",
        ],
        "compiles a kernel for TPUs ahead of time, 2 to 44 s; the kernel is interpreted beside it",
    ),
    **dict.fromkeys(
        [
            "tests/pallas_kernels/decode/test_lowering.py::test_benchmark_shapes_lower",
            "tests/pallas_kernels/decode/test_lowering.py::"
            "test_lowers_float8_in_tiles_of_two_pages",
            "tests/pallas_kernels/decode/test_lowering.py::"
            "test_no_work_on_arrays_around_the_kernel",
            "tests/pallas_kernels/decode/test_lowering.py::"
            "test_the_merge_in_place_is_shielded_from_slices",
        ],
        "lowers for a GPU, 2 to 7 s, what the forms and dtypes that are lowered beside it hold",
    ),
    **dict.fromkeys(
        [
            "tests/pallas_kernels/training/test_kernels.py::"
            "test_gpu_kernels_lower_for_a_piece_of_a_row",
            "tests/pallas_kernels/training/test_kernels.py::"
            "test_the_platform_lowered_for_picks_the_kernel",
        ],
        "lowers for a GPU, 7 s, the kernels that are lowered beside it",
    ),
    "tests/pallas_kernels/training/test_reference.py::"
    "test_memory_is_linear_in_the_length": "compiles a step over 4,096 tokens, to bound its memory",
}


@pytest.fixture(scope="module")
def collected(tmp_path_factory) -> list[dict]:
    """Returns the instances of the guarded tests, collected in a process of its own."""
    path = tmp_path_factory.mktemp("collected") / "tests.jsonl"
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-n", "0"]
    command += ["-p", "no:cacheprovider", "-p", "tests.support.collected"]
    done = subprocess.run(
        [*command, "--collected-to", str(path), *GUARDED],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return [json.loads(line) for line in path.read_text().splitlines()]


def left_out(instances: list[dict]) -> dict[str, set[str]]:
    """Returns what tests are about in slow instances alone; "all" where every one is slow."""
    found: dict[bool, dict[str, set[str]]] = {False: defaultdict(set), True: defaultdict(set)}
    for one in instances:
        found[one["slow"]][one["test"]].update(["all", *one["families"]])
    missing = {test: kinds - found[False][test] for test, kinds in found[True].items()}
    return {test: kinds for test, kinds in missing.items() if kinds}


def test_every_law_has_a_quick_instance_for_every_policy_and_every_kernel_form(collected):
    missing = left_out(collected)
    assert {test: kinds for test, kinds in missing.items() if test not in ONLY_SLOW} == {}
    # What is quick by now is no longer excused.
    assert {test for test in ONLY_SLOW if "all" in missing.get(test, ())} == ONLY_SLOW.keys()
    assert len({one["test"] for one in collected}) > 100


def test_make_test_leaves_out_what_is_slow_and_continuous_integration_nothing():
    def command(target):
        call = ["make", "-n", "-o", ".venv/installed", target]
        done = subprocess.run(call, cwd=ROOT, check=True, capture_output=True, text=True)
        return done.stdout.split(" -m pytest ")[1]

    assert '-m "not slow"' in command("test")
    assert " -m " not in command("test-all")
    assert "make test-all\n" in (ROOT / ".ci" / "run").read_text()


def test_what_is_left_out_is_found():
    def instance(test, slow, *families):
        return {"test": test, "slow": slow, "families": list(families)}

    kept = [instance("a", False, "DMS"), instance("a", False, "TOVA"), instance("b", False)]
    further_rows = [instance("a", True, "DMS"), instance("b", True)]
    assert left_out(kept + further_rows) == {}
    lost = [instance("a", True, "Quest"), instance("c", True, "DMS")]
    assert left_out(kept + lost) == {"a": {"Quest"}, "c": {"all", "DMS"}}


def marked(values) -> list:
    """Returns the values that are slow."""
    return [value.values for value in values if hasattr(value, "marks") and value.marks]


def test_further_values_are_slow():
    assert marked([1, *further(2, 3)]) == [(2,), (3,)]
    assert marked([("a", 1), *further(("b", 2))]) == [("b", 2)]  # of two parameters
    assert marked(nightly_but({"x"}, ["y", "x", "z"])) == [("y",), ("z",)]
    assert nightly_but({"x"}, ["y", "x"])[1] == "x"


def test_of_each_kind_the_cheapest_stays():
    words = ["three", "one", "two", "four", "five"]
    assert marked(first_of_each(words, by=len)) == [("two",), ("five",)]
    dear_first = first_of_each(words, by=len, cost=lambda word: word != "five")
    assert marked(dear_first) == [("two",), ("four",)]
