"""`plan`: the memory and the time of a training run on a machine that you do not have.

Memory is computed from the shapes of the trainer's arrays (`StepProgram`) and of what a step keeps.
For 0.5B to 8B on one and two H200s it is within 10% of the measured peak; compiled programs of 32B
and 70B over 8 to 256 devices take 4 to 25% more (experiments/results/training). So a plan that
fits leaves a fifth of the memory.

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

from dms_jax import sharding
from dms_jax.checks import Count, check
from dms_jax.config import ModelConfig
from dms_jax.devices import DEVICES, Device
from dms_jax.errors import ConfigError
from dms_jax.model.language_model import LanguageModel
from dms_jax.policies import Policy, Vanilla, as_policy
from dms_jax.training.display import TRAINED, duration, short
from dms_jax.training.flops import attention_operations, layer_parameters, token_operations
from dms_jax.training.program import StepProgram, program_of_shape
from dms_jax.training.recipe import Recipe, Stage
from dms_jax.training.remat import LESS_MEMORY, kept_bytes

_SHARE_OF_PEAK = 0.5
_USABLE = 0.8  # share of a device's memory; see the docstring of the module
_EVERYTHING = 3.2  # what remat="nothing" keeps, times what "all_but_products" keeps (1B, an H200)
_CORES_A_CHIP = {"v5p": 2, "v5e": 1, "v6e": 1}
_OTHER_NAMES = {"v5litepod": "v5e"}


@dataclasses.dataclass(frozen=True)
class Machine:
    """Devices of one kind.

    Attributes:
      name: the name given by the user.
      kind: key of `dms_jax.devices.DEVICES`.
      count: number of devices: chips or GPUs.
    """

    name: str
    kind: str
    count: int

    @property
    def device(self) -> Device:
        """The data sheet of one device."""
        return DEVICES[self.kind]


def find_machine(name: str) -> Machine:
    """Returns the machine of a name.

    v5p-128            a TPU slice by its type: v5p counts cores, two a chip; v5e and v6e chips
    8xh200, h200       GPUs, or a number of chips (4xv5p)

    Raises:
      ConfigError: there is no such machine.
    """
    text, kind, count = str(name).strip().lower(), "", 0
    if found := re.fullmatch(r"(?:(\d+)\s*x\s*)?([a-z]\w*)", text):
        kind, count = _OTHER_NAMES.get(found[2], found[2]), int(found[1] or 1)
    elif found := re.fullmatch(r"(\w+)-(\d+)", text):
        kind = _OTHER_NAMES.get(found[1], found[1])
        count, rest = divmod(int(found[2]), _CORES_A_CHIP.get(kind, 1))
        if rest or kind not in _CORES_A_CHIP:
            count = 0
    if kind not in DEVICES or not count:
        raise ConfigError(
            f"There is no machine {name!r}. Give a TPU slice ('v5p-128', 'v6e-256') or a number of "
            f"devices ('8xh200') of {', '.join(DEVICES)}."
        )
    return Machine(str(name), kind, count)


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on each device while a step runs.

    Attributes:
      parameters: the trained parameters, in float32.
      optimizer: the moments of the trained parameters.
      frozen: parameters that no step changes: frozen ones, and the teacher's.
      temporaries: everything else: activations, gradients and buffers.
    """

    parameters: float
    optimizer: float
    frozen: float
    temporaries: float

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
            "",
            "Memory a device, GB (estimated)",
        ]
        fits = "fits" if self.fits else f"DOES NOT FIT {_USABLE:.0%}"
        rows = {
            "trained parameters (float32)": memory.parameters,
            "optimizer's moments": memory.optimizer,
            "frozen parameters and the teacher's": memory.frozen,
            "activations, gradients, buffers": memory.temporaries,
            "together": memory.total,
            f"of {machine.kind}: {fits}": machine.device.memory,
        }
        lines += [f"  {name:<40} {size / 1e9:9.2f}" for name, size in rows.items()]
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
      ConfigError: there is no such machine, the shards do not divide the devices, or they do not
        divide the recipe's batches.
    """
    config = model.config if isinstance(model, LanguageModel) else model
    check("plan: model", config, ModelConfig)
    check("plan: recipe", recipe, Recipe)
    policy = Vanilla() if policy is None else as_policy(policy)
    target = find_machine(machine)
    shards = {"model": model_shards, "expert": expert_shards, "sequence": sequence_shards}
    shards = {name: check(f"plan: {name}_shards", size, Count) for name, size in shards.items()}
    data, rest = divmod(target.count, math.prod(shards.values()))
    if rest:
        asked = " times ".join(f"`{name}_shards={n}`" for name, n in shards.items() if n > 1)
        raise ConfigError(
            f"plan: {target.name} has {target.count} devices, which {asked} does not divide."
        )
    sizes = sharding.mesh_axes(
        data, shards["model"], sequence=shards["sequence"], experts=shards["expert"]
    )
    types = (jax.sharding.AxisType.Auto,) * len(sizes)
    mesh = jax.sharding.AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=types)
    program = program_of_shape(
        config, policy, recipe, mesh, dtype, memory=float(target.device.memory)
    )
    stages = []
    for stage in program.recipe.stages_for(policy):
        passes = recipe.batch_of(stage) // recipe.pass_size(data)
        memory = _memory(config, program, stage, sharding.mesh_sizes(mesh), passes)
        operations = _operations(config, program, policy, stage)
        seconds = operations / (target.count * target.device.peak * _SHARE_OF_PEAK)
        stages.append(StagePlan(stage.kind, stage.steps, passes, memory, seconds))
    return Plan(
        machine=target,
        mesh=sizes,
        recipe=program.recipe,
        policy=policy,
        parameters=sum(x.size for x in program.parameters.values()),
        stages=tuple(stages),
    )


def bytes_a_device(tree: Any) -> int:
    """Returns the bytes that the arrays of a tree take on one device."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree)
    )


def _memory(
    config: ModelConfig,
    program: StepProgram,
    stage: Stage,
    shards: tuple[int, int, int],
    passes: int,
) -> Memory:
    """Returns the bytes of a step on each device.

    Beside the state: what the layers keep; what the backward pass computes again of one layer; the
    gradients in float32, twice if passes add to them; matrices in the type of the passes (trained
    ones of all layers on one device; else two layers of student and teacher with two gradients in
    float32, or all layers if devices hold them whole); and the output matrix, with two gradients if
    it is trained.
    """
    recipe, trained = program.recipe, program.state.parameters
    data, sequence, model = shards
    sequences = recipe.pass_size(data) // data
    axes: dict[str, int] = dict(model=model, sequence=sequence)
    products = kept_bytes(config, recipe, "all_but_products", sequences, **axes)
    # A stage "supervise" keeps the inputs of layers alone.
    remat: Any = "everything" if stage.kind == "supervise" else recipe.remat
    kept = kept_bytes(config, recipe, remat, sequences, **axes)
    if remat == "nothing":
        kept = _EVERYTHING * products
    held = bytes_a_device(trained)
    layers, own = (
        sum(x.size for name, x in arrays.items() if name.startswith("layers.")) / model
        for arrays in (program.parameters, trained)
    )
    matrices = 2 * own if data * sequence == 1 else 16 * layers / config.num_layers
    if program.shards.whole_layers and passes > 1:
        matrices = 2 * layers + 10 * own
    head = config.vocab_size * config.hidden_size / model
    output = head * (8 if "embedding" in trained else 2)
    return Memory(
        parameters=float(held),
        optimizer=float(bytes_a_device(program.state.optimizer)),
        frozen=float(bytes_a_device(program.constants)),
        temporaries=kept
        + products / config.num_layers
        + held * (2 if passes > 1 else 1)
        + matrices
        + output,
    )


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
