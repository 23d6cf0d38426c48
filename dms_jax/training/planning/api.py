"""`plan`: what a run takes, before it is paid for. Nothing is allotted and no accelerator needed.

The step of every stage is compiled ahead of time for a TPU topology, or for devices that are here;
the compiler says what memory it takes. Stages whose steps are one program, such as a ramp and the
steps after it, are compiled once. Operations are counted from the shapes.
"""

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
from dms_jax.training.flops import attention_operations, matrix_parameters, token_operations
from dms_jax.training.planning.lowering import AbstractStep, StepInputs, bytes_a_device
from dms_jax.training.planning.machines import find_machine
from dms_jax.training.planning.result import Memory, Plan, StagePlan
from dms_jax.training.recipe import Recipe, Stage
from dms_jax.training.remat import kept_bytes


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
    here: bool = False,
) -> Plan:
    """Returns what a training run takes on some machine, without running or allotting anything.

    Args:
      model: the model, or only its shape.
      policy: the policy to train for; None for vanilla.
      recipe: the recipe of the run.
      machine: a TPU slice ("v5p-128", "v6e-256") or a number of devices ("8xh200").
      model_shards: devices along which heads and feed-forward are split.
      expert_shards: devices along which heads and whole experts are split; both are one group.
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
    of_experts = check("plan: expert_shards", expert_shards, Count)
    of_rows = check("plan: sequence_shards", sequence_shards, Count)
    others = {"model_shards": shards, "expert_shards": of_experts, "sequence_shards": of_rows}
    if target.count % math.prod(others.values()):
        asked = " times ".join(
            f"{name}={size}" for name, size in others.items() if size > 1 or name == "model_shards"
        )
        raise ConfigError(
            f"plan: {target.name} has {target.count} devices, which {asked} does not divide."
        )
    data = target.count // math.prod(others.values())
    # In the order of the topology: the places of real devices are chosen when they are there.
    found = target.devices_here() if here else target.devices()
    sizes = sharding.mesh_axes(data, shards, sequence=of_rows, experts=of_experts)
    devices = np.array(found, object).reshape(tuple(sizes.values()))
    types = (jax.sharding.AxisType.Auto,) * len(sizes)
    mesh = jax.sharding.Mesh(devices, tuple(sizes), axis_types=types)
    step = AbstractStep(config, policy, recipe, mesh, dtype, memory=float(target.device.memory))
    recipe = step.recipe
    return Plan(
        machine=target,
        mesh=(data, shards * of_experts),
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
    programs: list[tuple[StepInputs, Memory]] = []
    planned = []
    for stage in recipe.stages_for(policy):
        inputs = step.inputs(stage)
        done = [memory for known, memory in programs if known == inputs]
        if not done:
            done = [_compile(step, inputs, config, recipe, mesh)]
            programs.append((inputs, done[0]))
        executed, needed = _operations(config, step, recipe, policy, stage)
        passes = (stage.batch_size or recipe.batch_size) // size
        planned.append(StagePlan(stage.kind, stage.steps, passes, done[0], executed, needed))
    return tuple(planned)


def _compile(
    step: AbstractStep,
    inputs: StepInputs,
    config: ModelConfig,
    recipe: Recipe,
    mesh: jax.sharding.Mesh,
) -> Memory:
    """Returns the memory on each device."""
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
        temporary, exact = asked, False
    else:
        analysis: Any = compiled.memory_analysis()
        temporary, exact = float(analysis.temp_size_in_bytes), True
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
    )


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
    shapes = {name: x.shape for name, x in step.parameters.items()}
    matrices = matrix_parameters(shapes, config.experts)
    keys = (recipe.sequence_length + 1) / 2
    attention = attention_operations(config, keys)
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
