"""`Plan`: what a training run takes in memory, operations and time; and its report.

Seconds are estimates of computing alone: operations that are executed / (devices * peak * 0.5).
What devices send to each other is not counted, so that on several of them they are the least.

0.5 is between the shares of the peak that executed operations were measured at on one H200 (0.46
for a model of 1B parameters, 0.58 for frozen weights of 8B: experiments/results/training at commit
e04d67c4), which has the matrix units of an H100. Other devices are taken to reach as much. B200 may
not, whose attention has kernels of Ampere's products.
"""

import dataclasses
from typing import Any

from dms_jax.policies import Policy
from dms_jax.training.display import TRAINED, duration, short
from dms_jax.training.planning.machines import Machine
from dms_jax.training.recipe import Recipe

_SHARE_OF_PEAK = 0.5
_USABLE = 0.93  # share of a device's memory; a runtime and fragments take the rest


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on each device while a step runs.

    Attributes:
      parameters: the trained parameters, in float32.
      optimizer: their moments.
      frozen: parameters that no step changes: frozen ones, and the teacher's.
      gradients: the sum of the gradients over the passes.
      activations: what the layers keep for the backward pass (`Recipe.remat`).
      temporaries: everything else that the compiler's program takes beside its arguments.
      exact: whether the compiler gave the sum; otherwise it refused the program and named it.
    """

    parameters: float
    optimizer: float
    frozen: float
    gradients: float
    activations: float
    temporaries: float
    exact: bool = True

    @property
    def total(self) -> float:
        """The bytes of all parts together."""
        names = ("parameters", "optimizer", "frozen", "gradients", "activations", "temporaries")
        return sum(getattr(self, name) for name in names)


@dataclasses.dataclass(frozen=True)
class StagePlan:
    """What an optimizer step of one stage takes.

    Attributes:
      kind: the kind of the stage (`Stage`).
      steps: optimizer steps.
      passes: passes of an optimizer step.
      memory: bytes on each device.
      operations: operations that all devices execute in an optimizer step, recomputation included.
      model_operations: those that the model needs, by which utilisation is counted.
    """

    kind: str
    steps: int
    passes: int
    memory: Memory
    operations: float
    model_operations: float


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a run takes.

    Attributes:
      machine: the devices.
      mesh: devices along `data` and along `model`.
      recipe: the recipe.
      policy: the policy.
      parameters: parameters of the model.
      stages: what each stage takes, in their order.
      here: whether the programs are those of devices that are here.
      sequence: devices along `sequence`.
    """

    machine: Machine
    mesh: tuple[int, int]
    recipe: Recipe
    policy: Policy
    parameters: int
    stages: tuple[StagePlan, ...]
    here: bool = False
    sequence: int = 1

    @property
    def exact(self) -> bool:
        """Whether the programs are those of the machine's own compiler."""
        return self.machine.compiled or self.here

    @property
    def largest(self) -> StagePlan:
        """The stage that takes the most memory."""
        return max(self.stages, key=lambda stage: stage.memory.total)

    @property
    def memory(self) -> Memory:
        """Bytes on each device, in the stage that takes the most."""
        return self.largest.memory

    @property
    def fits(self) -> bool:
        """Whether the steps of every stage fit a device."""
        return self.memory.total <= _USABLE * self.machine.device.memory

    def step_seconds(self, stage: StagePlan) -> float:
        """Returns the seconds of an optimizer step of a stage if nothing is sent."""
        return stage.operations / (self.machine.count * self.machine.device.peak * _SHARE_OF_PEAK)

    @property
    def tokens(self) -> int:
        """Tokens of the whole run."""
        return self.recipe.total_tokens(self.policy)

    @property
    def run_seconds(self) -> float:
        """Seconds of the whole run, every stage's steps, if nothing is sent."""
        return sum(stage.steps * self.step_seconds(stage) for stage in self.stages)

    def __str__(self) -> str:
        parts = [_head(self), _memory(self), _time(self)]
        return "\n\n".join("\n".join(lines) for lines in parts)

    def figures(self) -> dict[str, Any]:
        """Returns all of it as JSON data, with the lines that are printed."""
        data, model = self.mesh
        return {
            "machine": self.machine.name,
            "devices": self.machine.count,
            "device": self.machine.kind,
            "mesh": {"data": data, "sequence": self.sequence, "model": model},
            "own_compiler": self.exact,
            "parameters": self.parameters,
            "policy": short(self.policy),
            "recipe": self.recipe.name,
            "tokens": self.tokens,
            "fits": self.fits,
            "device_bytes": self.machine.device.memory,
            "run_seconds": self.run_seconds,
            "stages": [
                dataclasses.asdict(stage)
                | {"bytes": stage.memory.total, "step_seconds": self.step_seconds(stage)}
                for stage in self.stages
            ],
            "report": str(self).splitlines(),
        }


def _head(plan: Plan) -> list[str]:
    recipe, machine = plan.recipe, plan.machine
    data, model = plan.mesh
    of_rows = f"sequence {plan.sequence}, " if plan.sequence > 1 else ""
    trained = TRAINED[recipe.trained_for(plan.policy)]
    stages = ", ".join(f"{stage.steps:,} of {stage.kind}" for stage in plan.stages)
    counts = sorted({stage.passes for stage in plan.stages})
    passes = " or ".join(f"{count:,}" for count in counts)
    lines = [
        f"{plan.parameters / 1e9:.1f}B parameters, {short(plan.policy)}, {recipe.name}: {trained}, "
        f"{recipe.loss.replace('_', ' ')}",
        f"On {machine.count} {machine.kind} ({machine.name}): data {data}, {of_rows}model {model}",
        f"{sum(stage.steps for stage in plan.stages):,} optimizer steps ({stages}), "
        f"{plan.tokens / 1e9:.3g}B tokens",
        f"A step: {passes} pass{'es' * (counts[-1] > 1)} of {recipe.pass_size(data)} sequences of "
        f"{recipe.sequence_length:,} tokens",
    ]
    if not plan.exact:
        lines.append(
            f"Estimated: the program is that of {machine.topology} (TPU), partitioned alike; its "
            "temporaries and fusions are a TPU's. For H100 and H200 their own compiler makes it: "
            "pip install jax-cuda13-pjrt jax-cuda13-plugin (of jax's version; no GPU needed)."
        )
    return lines


def _memory(plan: Plan) -> list[str]:
    memory = plan.memory
    rows = [
        ("parameters that are trained (float32)", memory.parameters),
        ("optimizer's moments", memory.optimizer),
        ("frozen parameters and the teacher's", memory.frozen),
        ("gradients", memory.gradients),
        ("what layers keep for the backward pass", memory.activations),
        ("other temporaries", memory.temporaries),
        ("together", memory.total),
    ]
    has = plan.machine.device.memory
    verdict = "fits" if plan.fits else "DOES NOT FIT"
    several = any(stage.memory != memory for stage in plan.stages)
    which = f" (in {plan.largest.kind}, which takes the most)" if several else ""
    lines = [f"Memory a device, GB{which}"]
    lines += [f"  {name:<44} {size / 1e9:9.2f}" for name, size in rows]
    lines.append(f"  {f'of {plan.machine.kind}: {verdict}':<44} {has / 1e9:9.2f}")
    if not memory.exact:
        lines.append("  (what the compiler asked for when it refused the program)")
    if not plan.fits:
        lines.append(
            "Less takes micro_batch_size=1, remat='everything', trainable='low_rank' or 'adapter', "
            "a shorter sequence_length, more devices, or model_shards and sequence_shards of 2."
        )
    return lines


def _time(plan: Plan) -> list[str]:
    count, peak = plan.machine.count, plan.machine.device.peak
    lines = []
    for stage in plan.stages:
        seconds = plan.step_seconds(stage)
        tokens = plan.recipe.sequence_length * plan.recipe.pass_size(plan.mesh[0]) * stage.passes
        lines.append(
            f"A step of {stage.kind} (estimated): {duration(seconds)}, {tokens / seconds:,.0f} "
            f"tokens/s, {stage.model_operations / (seconds * count * peak):.0%} of the peak"
        )
    hours = count * plan.run_seconds / 3600
    lines.append(f"The run (estimated): {duration(plan.run_seconds)}, {hours:,.0f} device-hours")
    if count > 1:
        lines.append("What devices send to each other is not counted: these are the least.")
    lines.append(
        f"Operations are taken to run at {_SHARE_OF_PEAK:.0%} of the peak: an H200 was measured at "
        "46% to 58%, and nothing else was"
    )
    return lines
