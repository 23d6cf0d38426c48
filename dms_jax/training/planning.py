"""`plan`: the memory and the time of a training run on a machine that you do not have.

libtpu compiles the step of each stage ahead of time and reports its memory. Stages whose steps take
the same arguments, such as a ramp and the steps after it, share a program. A plan for GPUs compiles
for the same number of v5p chips, which partition the step in the same way but need other
temporaries: on H200s the estimate was up to a third too high (experiments/results/training).

Seconds estimate computing time only, executed operations / (devices * peak * 0.5), without
communication between devices. 0.5 is between the shares of the peak that were measured on one H200
(0.46 for a model of 1B parameters, 0.58 for frozen weights of 8B: experiments/results/training at
commit e04d67c4).
"""

import dataclasses
import math
import re
from typing import Any

import jax
import numpy as np

from dms_jax import sharding
from dms_jax.checks import Count, check
from dms_jax.config import ModelConfig
from dms_jax.errors import ConfigError
from dms_jax.model.language_model import LanguageModel
from dms_jax.policies import Policy, Vanilla, as_policy
from dms_jax.training.display import TRAINED, duration, short
from dms_jax.training.flops import attention_operations, layer_parameters, token_operations
from dms_jax.training.machines import Machine, find_machine
from dms_jax.training.program import StepProgram, program_of_shape
from dms_jax.training.recipe import Recipe, Stage
from dms_jax.training.remat import LESS_MEMORY
from dms_jax.training.shards import check_split

_SHARE_OF_PEAK = 0.5
_USABLE = 0.93  # share of a device's memory; a runtime and fragments take the rest


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on each device while a step runs.

    Attributes:
      parameters: the trained parameters, in float32.
      optimizer: the moments of the trained parameters.
      frozen: parameters that no step changes: frozen ones, and the teacher's.
      temporaries: everything else: activations, gradients and buffers.
      refused: whether the compiler refused the program and reported the memory it would take.
    """

    parameters: float
    optimizer: float
    frozen: float
    temporaries: float
    refused: bool = False

    @property
    def total(self) -> float:
        """The bytes of all parts together."""
        return self.parameters + self.optimizer + self.frozen + self.temporaries


@dataclasses.dataclass(frozen=True)
class StagePlan:
    """Memory and time of an optimizer step of one stage.

    Attributes:
      kind: the kind of the stage (`Stage`).
      steps: optimizer steps.
      passes: passes of an optimizer step.
      memory: bytes on each device.
      seconds: seconds of an optimizer step.
    """

    kind: str
    steps: int
    passes: int
    memory: Memory
    seconds: float


@dataclasses.dataclass(frozen=True)
class Plan:
    """Memory and time of a run; printing it gives a report.

    Attributes:
      machine: the devices.
      mesh: devices along each axis.
      recipe: the recipe.
      policy: the policy.
      parameters: parameters of the model.
      stages: the plan of each stage, in order.
    """

    machine: Machine
    mesh: dict[str, int]
    recipe: Recipe
    policy: Policy
    parameters: int
    stages: tuple[StagePlan, ...]

    @property
    def memory(self) -> Memory:
        """Bytes on each device, in the stage that takes the most."""
        return max((stage.memory for stage in self.stages), key=lambda memory: memory.total)

    @property
    def fits(self) -> bool:
        """Whether the steps of every stage fit a device."""
        return self.memory.total <= _USABLE * self.machine.device.memory

    @property
    def seconds(self) -> float:
        """Seconds of the whole run."""
        return sum(stage.steps * stage.seconds for stage in self.stages)

    def figures(self) -> dict[str, Any]:
        """Returns the plan as JSON data, printed lines included."""
        return {
            "machine": self.machine.name,
            "mesh": self.mesh,
            "policy": short(self.policy),
            "recipe": self.recipe.name,
            "parameters": self.parameters,
            "tokens": self.recipe.total_tokens(self.policy),
            "fits": self.fits,
            "seconds": self.seconds,
            "stages": [dataclasses.asdict(stage) for stage in self.stages],
            "report": str(self).splitlines(),
        }

    def __str__(self) -> str:
        recipe, machine, memory = self.recipe, self.machine, self.memory
        trained = TRAINED[recipe.trained_for(self.policy)]
        mesh = ", ".join(f"{name} {size}" for name, size in self.mesh.items())
        tokens = recipe.total_tokens(self.policy)
        lines = [
            f"{self.parameters / 1e9:.1f}B parameters, {short(self.policy)}, {recipe.name}: "
            f"{trained}, {recipe.loss.replace('_', ' ')}",
            f"On {machine.count} {machine.kind} ({machine.name}): {mesh}",
        ]
        if not machine.is_tpu:
            lines.append(
                f"Estimated from a TPU's program ({machine.topology}): memory may be a quarter less"
            )
        lines += ["", "Memory a device, GB"]
        rows = {
            "trained parameters (float32)": memory.parameters,
            "optimizer's moments": memory.optimizer,
            "frozen parameters and the teacher's": memory.frozen,
            "activations, gradients, buffers": memory.temporaries,
            "together": memory.total,
            f"of {machine.kind}: {'fits' if self.fits else 'DOES NOT FIT'}": machine.device.memory,
        }
        lines += [f"  {name:<40} {size / 1e9:9.2f}" for name, size in rows.items()]
        if memory.refused:
            lines.append("  (the compiler's figure when it refused the program)")
        if not self.fits:
            lines.append(LESS_MEMORY)
        lines += ["", "Time (estimated, without what devices send to each other)"]
        for stage in self.stages:
            several = f" of {stage.passes:,} passes" if stage.passes > 1 else ""
            lines.append(
                f"  {stage.steps:,} steps of {stage.kind}: {duration(stage.seconds)} each{several}"
            )
        hours = machine.count * self.seconds / 3600
        lines.append(
            f"  the run, {tokens / 1e9:.3g}B tokens: {duration(self.seconds)}, {hours:,.0f} "
            "device-hours"
        )
        return "\n".join(lines)


def plan(
    model: ModelConfig | LanguageModel,
    policy: Policy | str | None = None,
    *,
    recipe: Recipe,
    machine: str,
    model_shards: int = 1,
    expert_shards: int = 1,
    sequence_shards: int = 1,
    dtype: str = "bfloat16",
) -> Plan:
    """Returns the memory and time of a training run on a machine, without running or allocating.

    Args:
      model: the model, or only its shape.
      policy: the policy to train for; None for vanilla.
      recipe: the recipe of the run.
      machine: a TPU slice ("v5p-128", "v6e-256") or a number of devices ("8xh200").
      model_shards: devices along which heads and feed-forward are split.
      expert_shards: devices along which heads and whole experts are split (one group for both).
      sequence_shards: devices along which the tokens of each sequence are split. The remaining
        factor splits sequences; both axes hold shards of every parameter.
      dtype: type of the model's parameters.

    Raises:
      ConfigError: there is no such machine, libtpu is missing, or the batch does not divide.
    """
    config = model.config if isinstance(model, LanguageModel) else model
    check("plan: model", config, ModelConfig)
    check("plan: recipe", recipe, Recipe)
    policy = Vanilla() if policy is None else as_policy(policy)
    target = find_machine(machine)
    sizes = mesh_on(
        target, policy, recipe, model=model_shards, expert=expert_shards, sequence=sequence_shards
    )
    # In the order of the topology; real devices are arranged when the run starts.
    devices = np.array(target.devices(), object).reshape(tuple(sizes.values()))
    types = (jax.sharding.AxisType.Auto,) * len(sizes)
    mesh = jax.sharding.Mesh(devices, tuple(sizes), axis_types=types)
    program = program_of_shape(
        config, policy, recipe, mesh, dtype, memory=float(target.device.memory)
    )
    stages, compiled = [], {}
    for stage in program.recipe.stages_for(policy):
        leaves, structure = jax.tree.flatten(program.inputs(stage))
        inputs = (structure, *leaves)
        if inputs not in compiled:
            compiled[inputs] = _memory(program, stage)
        passes = recipe.batch_of(stage) // recipe.pass_size(sizes[sharding.DATA])
        operations = _operations(config, program, policy, stage)
        seconds = operations / (target.count * target.device.peak * _SHARE_OF_PEAK)
        stages.append(StagePlan(stage.kind, stage.steps, passes, compiled[inputs], seconds))
    return Plan(
        machine=target,
        mesh=sizes,
        recipe=program.recipe,
        policy=policy,
        parameters=sum(x.size for x in program.parameters.values()),
        stages=tuple(stages),
    )


def mesh_on(machine: Machine, policy: Policy, recipe: Recipe, **shards: int) -> dict[str, int]:
    """Returns the devices along each axis of a run's mesh.

    Args:
      machine: the devices.
      policy: the policy to train for.
      recipe: the recipe of the run.
      **shards: `model`, `expert` and `sequence`, devices that each of them splits.

    Raises:
      ConfigError: the shards do not divide the devices, or they do not divide the recipe's batches.
    """
    shards = {name: check(f"plan: {name}_shards", size, Count) for name, size in shards.items()}
    data, rest = divmod(machine.count, math.prod(shards.values()))
    if rest:
        asked = " times ".join(f"`{name}_shards={n}`" for name, n in shards.items() if n > 1)
        raise ConfigError(
            f"plan: {machine.name} has {machine.count} devices, which {asked} does not divide."
        )
    sizes = sharding.mesh_axes(
        data, shards["model"], sequence=shards["sequence"], experts=shards["expert"]
    )
    check_split(recipe, policy, jax.sharding.AbstractMesh(tuple(sizes.values()), tuple(sizes)))
    recipe.pass_size(data)
    return sizes


def bytes_a_device(tree: Any) -> int:
    """Returns the bytes that the arrays of a tree take on one device."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree)
    )


def _memory(program: StepProgram, stage: Stage) -> Memory:
    """Compiles the step of a stage, and returns the memory on each device."""
    passes, _ = program.inputs(stage)
    state = program.state
    parts = dict(parameters=state.parameters, optimizer=state.optimizer, frozen=program.constants)
    held: Any = {name: float(bytes_a_device(arrays)) for name, arrays in parts.items()}
    try:
        compiled = program.lower(stage).compile()
    except jax.errors.JaxRuntimeError as error:
        asked = _asked_for(str(error))
        if asked is None:
            raise
        return Memory(**held, temporaries=max(0.0, asked - sum(held.values())), refused=True)
    analysis: Any = compiled.memory_analysis()
    return Memory(**held, temporaries=float(bytes_a_device(passes) + analysis.temp_size_in_bytes))


def _asked_for(message: str) -> float | None:
    """Returns the bytes of a program in the message with which libtpu refuses it.

    "HLO temporaries" include the arguments: x + 1 of 20 GB has 40 GB of them. None if the message
    is about something else.
    """
    found = re.search(r"(?:Used |HLO temporaries \()([\d.]+)([KMG])", message)
    return None if found is None else float(found[1]) * 1024 ** " KMG".index(found[2])


def _operations(config: ModelConfig, program: StepProgram, policy: Policy, stage: Stage) -> float:
    """Returns the operations that an optimizer step executes, recomputation included."""
    recipe = program.recipe
    keys = (recipe.sequence_length + 1) / 2
    matrices = layer_parameters(program.parameters, config.experts)
    operations = token_operations(
        config,
        matrices,
        keys,
        frozen=recipe.trained_for(policy) != "all",
        teacher=recipe.loss == "distillation",
        stage=stage.kind,
    )
    if stage.kind != "supervise" and recipe.remat in ("all_but_attention", "everything"):
        operations += 2 * matrices
        if recipe.remat == "everything":
            operations += attention_operations(config, keys)
    return operations * recipe.batch_of(stage) * recipe.sequence_length
