"""`Plan`: what a training run takes in memory, collectives, operations and time; and its report.

Seconds are estimates:

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
from typing import Any

from dms_jax.policies import Policy
from dms_jax.training.display import short
from dms_jax.training.planning.collectives import Collective
from dms_jax.training.planning.machines import GPUS_A_HOST, Machine
from dms_jax.training.recipe import Recipe
from dms_jax.training.shards import finer_split

_SHARE_OF_PEAK = 0.5
_MEASURED = ("h200", "h100")  # measured on the first; the second has the same matrix units
_USABLE = 0.93  # share of a device's memory; a runtime and fragments take the rest
_MOST_COLLECTIVES = 8  # that are listed
_FILLED = 0.9  # share of the memory that may be taken where more devices are advised
_MOST_TIMES = 64  # so many times as many devices are no advice


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
        return self.memory.total <= _USABLE * self.machine.device.memory

    def compute_seconds(self, stage: StagePlan) -> float:
        """Returns the seconds of an optimizer step of a stage if nothing is sent."""
        return stage.operations / (self.machine.count * self.machine.device.peak * _SHARE_OF_PEAK)

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
        parts = [_head(self), _memory(self), _sending(self), [*_time(self), *_advice(self)]]
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
            "stages": [self._stage_figures(stage) for stage in self.stages],
            "report": str(self).splitlines(),
        }

    def _stage_figures(self, stage: StagePlan) -> dict[str, Any]:
        computed = {
            "bytes": stage.memory.total,
            "step_seconds": self.step_seconds(stage),
            "compute_seconds": self.compute_seconds(stage),
            "communication_seconds": self.communication_seconds(stage),
            "bytes_sent": sum(each.total_bytes for each in stage.collectives),
        }
        return dataclasses.asdict(stage) | computed


def _head(plan: Plan) -> list[str]:
    recipe, machine = plan.recipe, plan.machine
    data, model = plan.mesh
    of_rows = f"sequence {plan.sequence}, " if plan.sequence > 1 else ""
    trained = {
        "all": "all weights",
        "adapter": "the adapter beside frozen weights",
        "low_rank": "low-rank updates and the adapter beside frozen weights",
    }[recipe.trained_for(plan.policy)]
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
    return lines


def _sending(plan: Plan) -> list[str]:
    if plan.machine.count == 1:
        return ["Collectives: none, on one device"]
    stage = plan.longest
    if not _sending_known(plan, stage):
        return ["Collectives: unknown, because the program was refused"]
    total = sum(each.total_bytes for each in stage.collectives)
    which = f" of {stage.kind}" if len(_groups(plan)) > 1 else ""
    lines = [f"Collectives a device and optimizer step{which}: {_bytes(total)} sent"]
    for each in stage.collectives[:_MOST_COLLECTIVES]:
        lines.append(
            f"  {_bytes(each.total_bytes):>10}  {each.count:>7,} x {each.kind} {each.shape} "
            f"over {each.group}"
        )
    if rest := stage.collectives[_MOST_COLLECTIVES:]:
        lines.append(
            f"  {_bytes(sum(x.total_bytes for x in rest)):>10}  in {len(rest)} other kinds"
        )
    return lines


def _time(plan: Plan) -> list[str]:
    groups = _groups(plan)
    least, most = (seconds / 3600 for seconds in plan.run_seconds)
    count = plan.machine.count
    lines = []
    for stages in groups:
        which = f" of {' and '.join(stage.kind for stage in stages)}" if len(groups) > 1 else ""
        lines += _step(plan, stages[0], which)
    took = (
        f"{_hours(least)} to {_hours(most)}, {least * count:,.0f} to {most * count:,.0f}"
        if all(_sending_known(plan, stage) for stage in plan.stages)
        else f"at least {_hours(least)}, {least * count:,.0f}"
    )
    lines.append(f"The run (estimated): {took} device-hours")
    return [*lines, _share_of_peak(plan)]


def _share_of_peak(plan: Plan) -> str:
    """Says where the seconds of computing come from."""
    kind = plan.machine.kind
    seen = (
        "" if kind in _MEASURED else f"; a {kind} is taken to reach as much, and was not measured"
    )
    return (
        f"Operations are taken to run at {_SHARE_OF_PEAK:.0%} of the peak: an H200 was measured at "
        f"46% to 58%{seen}"
    )


def _step(plan: Plan, stage: StagePlan, which: str) -> list[str]:
    low, high = plan.step_seconds(stage)
    count, peak = plan.machine.count, plan.machine.device.peak
    tokens = plan.recipe.sequence_length * plan.recipe.pass_size(plan.mesh[0]) * stage.passes
    shares = sorted(stage.model_operations / (seconds * count * peak) for seconds in (low, high))
    computing = f"computing {_seconds(plan.compute_seconds(stage))}"
    took = (
        f"{computing}, sending {_seconds(plan.communication_seconds(stage))}: {_seconds(low)} to "
        f"{_seconds(high)}, {tokens / high:,.0f} to {tokens / low:,.0f} tokens/s, {shares[0]:.0%} "
        f"to {shares[1]:.0%} of the peak"
        if _sending_known(plan, stage)
        else f"{computing}, sending unknown: at most {tokens / low:,.0f} tokens/s, {shares[1]:.0%} "
        "of the peak"
    )
    return [
        f"Operations a step{which}: {stage.operations:.3g} executed, {stage.model_operations:.3g} "
        "of the model",
        f"A step{which} (estimated): {took}",
    ]


def _sending_known(plan: Plan, stage: StagePlan) -> bool:
    """Returns whether the program of a stage was compiled, or nothing is sent in any case."""
    return plan.machine.count == 1 or stage.memory.exact


def _groups(plan: Plan) -> list[list[StagePlan]]:
    """Returns the stages, those whose steps take the same together."""
    groups: list[list[StagePlan]] = []
    for stage in plan.stages:
        same = next((group for group in groups if group[0].same_step(stage)), None)
        if same is None:
            groups.append([stage])
        else:
            same.append(stage)
    return groups


def _advice(plan: Plan) -> list[str]:
    recipe, memory, machine = plan.recipe, plan.memory, plan.machine
    data, model = plan.mesh
    advice = []
    if not plan.fits:
        state = memory.parameters + memory.optimizer + memory.frozen + memory.gradients
        passing = memory.activations + memory.temporaries
        room = machine.device.memory
        if recipe.pass_size(data) > data:
            advice.append("a smaller micro_batch_size (1): the passes of a step take turns")
        if state > room / 2:
            # A program that was refused says nothing of what another machine's would set aside.
            each = memory.activations + (memory.temporaries if memory.exact else 0.0)
            if each < _FILLED * room:  # else no number of devices would do
                needed = machine.count
                while state * machine.count / needed + each > _FILLED * room:
                    needed *= 2
                if needed <= _MOST_TIMES * machine.count:  # else it is what each holds that counts
                    said = f"more devices: {needed} would hold it, as far as the state goes"
                    advice.append(said)
            if recipe.trained_for(plan.policy) == "all":
                advice.append("trainable='low_rank' or 'adapter': no moments of frozen weights")
        if passing > room / 4:
            if recipe.remat != "everything":
                advice.append("remat='everything': layers are computed again in the backward pass")
            halves = machine.count % (2 * model * plan.sequence) == 0
            if halves:
                advice.append(
                    f"model_shards={2 * model}: heads, feed-forward and logits are split further"
                )
            if halves and (finer := finer_split(recipe, plan.sequence)):
                advice.append(f"sequence_shards={finer}: tokens of a sequence are split further")
            advice.append(f"a sequence_length of {recipe.sequence_length // 2:,} or less")
    elif plan.communication_seconds(plan.longest) > plan.compute_seconds(plan.longest):
        if recipe.micro_batch_size and data * recipe.micro_batch_size < recipe.batch_size:
            advice.append(
                f"micro_batch_size={2 * recipe.micro_batch_size}, if memory allows: parameters are "
                "gathered once a pass, and there would be half as many"
            )
        if not machine.is_tpu and model > GPUS_A_HOST:
            advice.append(f"model_shards of at most {GPUS_A_HOST}: within one host")
    if not advice:
        return []
    why = "It does not fit" if not plan.fits else "It sends for longer than it computes"
    return ["", f"{why}. What would change that:", *(f"  - {each}" for each in advice)]


def _bytes(size: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds < 100 else f"{seconds:,.0f} s"


def _hours(hours: float) -> str:
    if hours < 1:
        return f"{hours * 60:.3g} minutes"
    return f"{hours:.3g} hours" if hours < 100 else f"{hours:,.0f} hours"
