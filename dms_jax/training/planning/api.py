"""`plan`: what a run takes, before it is paid for. Nothing is allotted and no accelerator needed.

The step of every stage is compiled ahead of time for a TPU topology, or for devices that are here;
the compiler says what memory it takes, and its program which collectives it runs. Stages whose
steps are one program, such as a ramp and the steps after it, are compiled once. Operations are
counted from the shapes. Seconds are estimates:

    computing    operations that are executed / (devices * peak * 0.5)
    sending      bytes that a device sends in collectives / bandwidth of its link
    a step       between the larger of the two, where sending is hidden behind computing, and
                 their sum

0.5 is between the shares of the peak that executed operations were measured at on one H200 (0.46
for a model of 1B parameters, 0.58 for frozen weights of 8B: experiments/results/training), which
has the matrix units of an H100. On nothing else was it measured: other devices are taken to reach
as much, and the report says so. B200 may not, whose attention has kernels of Ampere's products.
"""

import dataclasses
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
from dms_jax.training.planning.collectives import Collective, collectives
from dms_jax.training.planning.lowering import AbstractStep, StepInputs, bytes_a_device
from dms_jax.training.planning.machines import Machine, find_machine
from dms_jax.training.recipe import Recipe, Stage
from dms_jax.training.remat import kept_bytes
from dms_jax.training.throughput import matrix_parameters, token_operations

SHARE_OF_PEAK = 0.5
MEASURED = ("h200", "h100")  # it was seen on the first; the second has the same matrix units
# What a runtime and fragments take of a device's memory.
USABLE = 0.93


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
        """All of it."""
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
      collectives: those of an optimizer step, those that send most first; empty if the program does
        not fit the topology that it was compiled for.
      operations: operations that all devices execute in an optimizer step, recomputation included.
      model_operations: those that the model needs, by which utilisation is counted.
    """

    kind: str
    steps: int
    passes: int
    memory: Memory
    collectives: list[Collective]
    operations: float
    model_operations: float

    def same_step(self, other: "StagePlan") -> bool:
        """Whether a step takes what one of another stage takes."""
        return dataclasses.replace(self, kind=other.kind, steps=other.steps) == other


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
    def longest(self) -> StagePlan:
        """The stage that takes the most time."""
        return max(self.stages, key=lambda stage: stage.steps * self.step_seconds(stage)[1])

    @property
    def memory(self) -> Memory:
        """Bytes on each device, in the stage that takes the most."""
        return self.largest.memory

    @property
    def fits(self) -> bool:
        """Whether the steps of every stage fit a device."""
        return self.memory.total <= USABLE * self.machine.device.memory

    def compute_seconds(self, stage: StagePlan) -> float:
        """Returns the seconds of an optimizer step of a stage if nothing is sent."""
        return stage.operations / (self.machine.count * self.machine.device.peak * SHARE_OF_PEAK)

    def communication_seconds(self, stage: StagePlan) -> float:
        """Returns the seconds of an optimizer step of a stage that a device sends for."""
        seconds = (
            each.total_bytes / self.machine.bandwidth(each.group) for each in stage.collectives
        )
        return float(sum(seconds))

    def step_seconds(self, stage: StagePlan) -> tuple[float, float]:
        """Returns the seconds of a step: sending behind computing, and one after the other."""
        compute, send = self.compute_seconds(stage), self.communication_seconds(stage)
        return max(compute, send), compute + send

    @property
    def tokens(self) -> int:
        """Tokens of the whole run."""
        return self.recipe.total_tokens(self.policy)

    @property
    def run_seconds(self) -> tuple[float, float]:
        """Seconds of the whole run: every stage's steps."""
        each = [(stage.steps, *self.step_seconds(stage)) for stage in self.stages]
        return sum(steps * low for steps, low, _ in each), sum(
            steps * high for steps, _, high in each
        )

    def __str__(self) -> str:
        from dms_jax.training.planning.report import report

        return report(self)

    def figures(self) -> dict[str, Any]:
        """Returns all of it as JSON data, with the lines that are printed."""
        from dms_jax.training.planning.report import figures

        return figures(self)


def plan(
    model: ModelConfig | LanguageModel,
    policy: Policy | str | None = None,
    *,
    recipe: Recipe,
    machine: str,
    model_shards: int = 1,
    sequence_shards: int = 1,
    dtype: str = "bfloat16",
    here: bool = False,
) -> Plan:
    """Returns what a training run takes on some machine, without running or allotting anything.

    Args:
      model: the model, or only its shape.
      policy: the policy to train for; None for vanilla.
      recipe: the recipe of the run.
      machine: a TPU slice ("v5p-128", "v6e-256") or a number of devices ("8xh200").
      model_shards: devices along which heads and feed-forward are split.
      sequence_shards: devices along which the tokens of each sequence are split; what is left
        splits sequences, and both hold shards of every parameter.
      dtype: type of the model's parameters.
      here: whether the machine is this one, whose own compiler is asked; nothing runs on it.

    Raises:
      ConfigError: there is no such machine, it is not here, libtpu is missing, or the batch does
        not divide.
    """
    config = model.config if isinstance(model, LanguageModel) else model
    check("plan: model", config, ModelConfig)
    check("plan: recipe", recipe, Recipe)
    policy = Vanilla() if policy is None else as_policy(policy)
    target = find_machine(machine)
    shards = check("plan: model_shards", model_shards, Count)
    of_rows = check("plan: sequence_shards", sequence_shards, Count)
    if target.count % (shards * of_rows):
        asked = f"model_shards={shards}"
        if of_rows > 1:
            asked = f"model_shards={shards} times sequence_shards={of_rows}"
        raise ConfigError(
            f"plan: {target.name} has {target.count} devices, which {asked} does not divide."
        )
    data = target.count // (shards * of_rows)
    # In the order of the topology: the places of real devices are chosen when they are there.
    found = target.devices_here() if here else target.devices()
    sizes = {sharding.DATA: data, sharding.SEQUENCE: of_rows, sharding.MODEL: shards}
    if of_rows == 1:
        del sizes[sharding.SEQUENCE]
    devices = np.array(found, object).reshape(tuple(sizes.values()))
    types = (jax.sharding.AxisType.Auto,) * len(sizes)
    mesh = jax.sharding.Mesh(devices, tuple(sizes), axis_types=types)
    step = AbstractStep(config, policy, recipe, mesh, dtype, memory=float(target.device.memory))
    recipe = step.recipe
    return Plan(
        machine=target,
        mesh=(data, shards),
        recipe=recipe,
        policy=policy,
        parameters=sum(x.size for x in jax.tree.leaves(step.parameters)),
        stages=_stages(step, config, recipe, policy, mesh),
        here=here,
        sequence=of_rows,
    )


def _stages(
    step: AbstractStep, config: ModelConfig, recipe: Recipe, policy: Policy, mesh: jax.sharding.Mesh
) -> tuple[StagePlan, ...]:
    """Returns what each stage takes; steps that take the same arguments are one program."""
    size = recipe.pass_size(mesh.shape[sharding.DATA])
    programs: list[tuple[StepInputs, tuple[Memory, list[Collective]]]] = []
    planned = []
    for stage in recipe.stages_for(policy):
        inputs = step.inputs(stage)
        done = [result for known, result in programs if known == inputs]
        if not done:
            done = [_compile(step, inputs, config, recipe, mesh)]
            programs.append((inputs, done[0]))
        memory, found = done[0]
        executed, needed = _operations(config, step, recipe, policy, stage)
        passes = (stage.batch_size or recipe.batch_size) // size
        planned.append(StagePlan(stage.kind, stage.steps, passes, memory, found, executed, needed))
    return tuple(planned)


def _compile(
    step: AbstractStep,
    inputs: StepInputs,
    config: ModelConfig,
    recipe: Recipe,
    mesh: jax.sharding.Mesh,
) -> tuple[Memory, list[Collective]]:
    """Returns the memory on each device, and the collectives."""
    of_kind = lambda mark: float(  # noqa: E731
        bytes_a_device({p: x for p, x in inputs.state.items() if (".optimizer" in p) == mark})
    )
    moments, trained = of_kind(True), of_kind(False)
    frozen = float(bytes_a_device(inputs.constants))
    arguments = trained + moments + frozen + bytes_a_device(inputs.passes)
    try:
        compiled = step.lower(inputs).compile()
    except jax.errors.JaxRuntimeError as error:
        asked = _asked_for(str(error), arguments)
        if asked is None:
            raise
        temporary, program, exact = asked, [], False
    else:
        analysis: Any = compiled.memory_analysis()
        temporary, exact = float(analysis.temp_size_in_bytes), True
        program = collectives(compiled.as_text(), step.devices)
    passes, sequences, _ = next(iter(inputs.passes.values())).shape
    assert recipe.remat != "auto"
    data, sequence, model = sharding.mesh_sizes(mesh)
    split = dict(model=model, sequence=sequence)
    kept = kept_bytes(config, recipe, recipe.remat, sequences // data, **split)
    kept = min(temporary, kept)
    several = passes > 1 or recipe.trained_for(step.policy) == "all"
    gradients = min(temporary - kept, trained) if several else 0.0
    return Memory(
        parameters=trained,
        optimizer=moments,
        frozen=frozen,
        gradients=gradients,
        activations=kept,
        temporaries=temporary - gradients - kept,
        exact=exact,
    ), program


def _asked_for(message: str, arguments: float) -> float | None:
    """Returns the bytes of temporaries that a compiler names when memory does not suffice.

    It names either everything or temporaries alone; None if it refuses for another reason.
    """
    size = r"([\d.]+)([KMG])"
    everything = re.search(rf"Used {size} of", message)
    found = everything or re.search(rf"required for HLO temporaries \({size}\)", message)
    if found is None:
        return None
    named = float(found[1]) * 1024 ** (" KMG".index(found[2]))
    return max(0.0, named - arguments) if everything else named


def _operations(
    config: ModelConfig, step: AbstractStep, recipe: Recipe, policy: Policy, stage: Stage
) -> tuple[float, float]:
    """Returns the operations of an optimizer step that are executed, and that the model needs."""
    tokens = (stage.batch_size or recipe.batch_size) * recipe.sequence_length
    matrices = matrix_parameters({name: x.shape for name, x in step.parameters.items()})
    keys = (recipe.sequence_length + 1) / 2
    attention = 4 * config.num_layers * config.num_heads * config.head_dim * keys
    needed = token_operations(
        config,
        matrices,
        keys,
        frozen=recipe.trained_for(policy) != "all",
        teacher=recipe.loss == "distillation",
        stage=stage.kind,
    )
    if stage.kind == "supervise":
        return tokens * needed, tokens * needed
    again = {
        "nothing": 0.0,
        "all_but_products": 0.0,
        "all_but_attention": 2.0 * matrices,
        "everything": 2.0 * matrices + attention,
    }
    return tokens * (needed + again[recipe.remat]), tokens * needed
