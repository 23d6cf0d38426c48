"""A plan in words and in figures: what is trained, memory, collectives, operations, seconds."""

import dataclasses
import typing

from dms_jax.training.display import short
from dms_jax.training.planning.machines import GPUS_A_HOST
from dms_jax.training.shards import finer_split

if typing.TYPE_CHECKING:
    from dms_jax.training.planning.api import Plan, StagePlan

_MOST_COLLECTIVES = 8
_FILLED = 0.9  # share of the memory that may be taken where more devices are advised
_MOST_TIMES = 64  # so many times as many devices are no advice


def report(plan: "Plan") -> str:
    """Returns the report of a plan."""
    return "\n".join(
        [*_head(plan), "", *_memory(plan), "", *_sending(plan), "", *_time(plan), *_advice(plan)]
    )


def figures(plan: "Plan") -> dict[str, typing.Any]:
    """Returns the figures of a plan as JSON data: bytes, seconds, operations."""
    data, model = plan.mesh
    return {
        "machine": plan.machine.name,
        "devices": plan.machine.count,
        "device": plan.machine.kind,
        "mesh": {"data": data, "sequence": plan.sequence, "model": model},
        "own_compiler": plan.exact,
        "parameters": plan.parameters,
        "policy": short(plan.policy),
        "recipe": plan.recipe.name,
        "tokens": plan.tokens,
        "fits": plan.fits,
        "device_bytes": plan.machine.device.memory,
        "run_seconds": plan.run_seconds,
        "stages": [_stage_figures(plan, stage) for stage in plan.stages],
        "report": report(plan).splitlines(),
    }


def _stage_figures(plan: "Plan", stage: "StagePlan") -> dict[str, typing.Any]:
    computed = {
        "bytes": stage.memory.total,
        "step_seconds": plan.step_seconds(stage),
        "compute_seconds": plan.compute_seconds(stage),
        "communication_seconds": plan.communication_seconds(stage),
        "bytes_sent": sum(each.total_bytes for each in stage.collectives),
    }
    return dataclasses.asdict(stage) | computed


def _head(plan: "Plan") -> list[str]:
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


def _memory(plan: "Plan") -> list[str]:
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


def _sending(plan: "Plan") -> list[str]:
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


def _time(plan: "Plan") -> list[str]:
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


def _share_of_peak(plan: "Plan") -> str:
    """Says where the seconds of computing come from."""
    from dms_jax.training.planning.api import MEASURED, SHARE_OF_PEAK

    kind = plan.machine.kind
    seen = "" if kind in MEASURED else f"; a {kind} is taken to reach as much, and was not measured"
    return (
        f"Operations are taken to run at {SHARE_OF_PEAK:.0%} of the peak: an H200 was measured at "
        f"46% to 58%{seen}"
    )


def _step(plan: "Plan", stage: "StagePlan", which: str) -> list[str]:
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


def _sending_known(plan: "Plan", stage: "StagePlan") -> bool:
    """Returns whether the program of a stage was compiled, or nothing is sent in any case."""
    return plan.machine.count == 1 or stage.memory.exact


def _groups(plan: "Plan") -> "list[list[StagePlan]]":
    """Returns the stages, those whose steps take the same together."""
    groups: list[list[StagePlan]] = []
    for stage in plan.stages:
        same = next((group for group in groups if group[0].same_step(stage)), None)
        if same is None:
            groups.append([stage])
        else:
            same.append(stage)
    return groups


def _advice(plan: "Plan") -> list[str]:
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
