"""Counts the programs that a sweep over a policy's numbers compiles, and keeps its answers.

The numbers of a policy are arguments of programs, so a sweep compiles what its first value needs,
and again only where a budget changes the size of a page table. Each sweep runs in this process one
value after another, on the model of 260,000 parameters that the library carries.

    python -m experiments.benchmarks.policy_sweeps \
        --out experiments/results/engine/policy_sweeps.json
"""

import dataclasses
import hashlib
import pathlib
import sys
import time
from typing import Any

import jax

import dms_jax
from dms_jax import DMS, TOVA, Policy, Quest, Sampling, SnapKV, assets
from dms_jax.command_line.reports import make_place
from dms_jax.command_line.running import command, run
from dms_jax.json_text import json_text
from experiments.benchmarks.kernel_timing import environment
from experiments.benchmarks.settings import check_numbers

SWEEPS: dict[str, list[Policy]] = {
    "TOVA, ten budgets": [
        TOVA(budget=40 + 2 * step, prefill="evict_past_budget") for step in range(10)
    ],
    "TOVA, ten ratios": [
        TOVA(compression_ratio=2 + step / 8, prefill="evict_past_budget") for step in range(10)
    ],
    "DMS, five offsets": [
        DMS(window=16, alpha_offset=offset) for offset in (-50.0, -5.0, 0.0, 5.0, 50.0)
    ],
    "Quest, four budgets": [Quest(budget=budget) for budget in (104, 112, 120, 128)],
    "SnapKV, four budgets, two intervals": [
        SnapKV(budget=budget, window=8, interval=interval)
        for budget in (36, 40, 44, 48)
        for interval in (8, 16)
    ],
}
PROMPT = "Once upon a time there was a little girl who had a red ball and a big dog. One day"


@dataclasses.dataclass(frozen=True)
class Config:
    """Count the programs of sweeps over policies."""

    new_tokens: int = 160
    """Tokens of each answer."""
    page_size: int = 8
    """Slots per page."""
    out: pathlib.Path = pathlib.Path("runs/policy_sweeps.json")
    """JSON file for the figures."""

    def __post_init__(self):
        check_numbers(self)


class Programs:
    """Counts the programs that jax lowers."""

    def __init__(self):
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, duration_secs: float, **_: Any) -> None:
        self.count += event == "/jax/core/compile/jaxpr_to_mlir_module_duration"


def main(config: Config) -> None:
    """Runs the sweeps and writes the figures."""
    make_place("--out", config.out)
    model, programs = dms_jax.load(assets.path("stories260k"), untrained=True), Programs()
    prompts = [PROMPT, PROMPT[: len(PROMPT) // 2]]
    sampling = Sampling(temperature=0, max_new_tokens=config.new_tokens)

    def answers(policy: Policy) -> str:
        out = dms_jax.generate(
            model, prompts, policy=policy, sampling=sampling, page_size=config.page_size
        )
        tokens = ",".join(str(token) for answer in out.tokens for token in answer)
        return hashlib.sha256(tokens.encode()).hexdigest()[:16]

    answers(dms_jax.Vanilla())  # what every policy shares
    sweeps = {}
    for name, policies in SWEEPS.items():
        rows = []
        for policy in policies:
            before, start = programs.count, time.perf_counter()
            digest = answers(policy)
            seconds = round(time.perf_counter() - start, 2)
            rows.append(
                dict(programs=programs.count - before, seconds=seconds, answers=digest)
                | {"policy": repr(policy)}
            )
        sweeps[name] = dict(
            programs=sum(row["programs"] for row in rows),
            after_the_first=sum(row["programs"] for row in rows[1:]),
            different_answers=len({row["answers"] for row in rows}),
            values=rows,
        )
        print(f"{name}: {sweeps[name]['programs']} programs", flush=True)
    results = environment() | dict(command=command(without=("--out",)), sweeps=sweeps)
    config.out.write_text(json_text(results, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(run(main, Config, description=__doc__))
