"""Sections of the page on DMC's ablations, longer contexts, KCache, and throughput."""

import pathlib
from typing import Any

from experiments.reproduction.claims import figures
from experiments.reproduction.claims.cells import (
    HEADS,
    KINDS,
    accuracy,
    kinds,
    percent,
    row,
    table,
    verdict,
    within,
)
from experiments.reproduction.claims.dms_sections import FOLDER
from experiments.reproduction.claims.results import Results, last_figure
from experiments.reproduction.claims.systems import (
    DMC,
    HAYSTACKS,
    KCACHE_LAYERS,
    KCACHE_TOPS,
    VANILLA,
)


def merging(results: Results) -> str:
    names = {
        "DMC": DMC,
        "DMC-C: heads of a layer alike": "dmc-c",
        "DMC-HardC: one decision a layer": "dmc-hard-c",
        "local prior: each layer at the target": "dmc-local-prior",
        "uniform importance": "dmc-uniform",
        "immediate target": "dmc-immediate",
    }
    rows = [
        row(results, f"{label}, at {ratio}", system, ratio)
        for ratio in ("2", "4")
        for label, system in names.items()
        if ratio == "4" or system != "dmc-immediate"
    ]
    lines = [
        f"- DMC at {ratio} is above “{label}”: "
        f"{verdict(results.gap((DMC, ratio), (system, ratio), 'reasoning'))}."
        for ratio in ("2", "4")
        for label, system in names.items()
        if system != DMC and results.cell(system, ratio, "reasoning")
    ]
    return f"""## Ablations of DMC

*DMC paper, appendices D and E: every one of these is worse than DMC.*

{table(HEADS, rows)}

{chr(10).join(lines)}"""


def longer(results: Results, folder: pathlib.Path) -> str:
    systems = {
        "vanilla": (VANILLA, ("1",)),
        "DMS, trained on 512": ("dms-short", ("2", "4")),
        "DMC, trained on 512": ("dmc-short", ("2", "4")),
        "TOVA": ("tova", ("2", "4")),
        "H2O": ("h2o", ("2", "4")),
        "Quest": ("quest", ("2", "4")),
    }
    measures = [f"{task}{tokens}" for task in ("needle", "tracking") for tokens in HAYSTACKS]
    rows = [
        [f"{label} at {at}", *(accuracy(results, system, at, measure) for measure in measures)]
        for label, (system, settings) in systems.items()
        for at in settings
    ]
    figures.longer(results, systems, folder / "longer.png")
    far = max(HAYSTACKS)
    lines = []
    for task in ("needle", "tracking"):
        merged = results.gap(("dms-short", "4"), ("dmc-short", "4"), f"{task}{far}")
        whole = results.gap(("dms-short", "4"), (VANILLA, "1"), f"{task}{far}")
        lines.append(
            f"- {task} at {far} tokens, ratio 4, DMS above DMC, both trained on 512: "
            f"{verdict(merged)}. DMS against vanilla: {percent(whole, sign=True)}."
        )
    return f"""## Contexts beyond the training's

*DMS paper, table 7: trained on 4K, DMS still finds the needle at 8K, where DMC falls to 0.* Here
both were trained on sequences of 512 tokens and asked at about {", ".join(map(str, HAYSTACKS))}
(the base model was trained on 2048). In percent:

{table(["", *measures], rows)}

![longer contexts]({FOLDER}/longer.png)

{chr(10).join(lines)}"""


def kcache(results: Results, folder: pathlib.Path) -> str:
    if not results.settings("kcache", "reasoning"):
        return ""
    heads = ["first layers whole", *(f"N = {top}" for top in KCACHE_TOPS)]
    rows = [
        [
            f"{layers}",
            *(accuracy(results, "kcache", f"N{top}L{layers}", "reasoning") for top in KCACHE_TOPS),
        ]
        for layers in KCACHE_LAYERS
    ]
    top = max(KCACHE_TOPS)
    gap = results.gap(("kcache", f"N{top}L2"), (VANILLA, "1"), "reasoning")
    low = min(KCACHE_TOPS)
    first = results.gap(("kcache", f"N{low}L2"), ("kcache", f"N{low}L0"), "reasoning")
    fails = results.gap((VANILLA, "1"), ("kcache", f"N{low}L0"), "reasoning")
    rows_of_kinds = [
        kinds(results, f"N = {low}, first layers whole: {layers}", "kcache", f"N{low}L{layers}")
        for layers in KCACHE_LAYERS[:2]
    ]
    of_kinds = table(
        ["", *(head for kind in KINDS for head in (f"{kind}, %", "above vanilla"))], rows_of_kinds
    )
    figures.kcache(results, folder / "kcache.png")
    return f"""## KCache: values fetched, first layers whole

*KCache paper, tables 2 and 3: with N = 128 of some thousand values and the first one or two layers
whole next to nothing is lost; without them a small N fails.* N values for each query head and step,
of answers that reach 420 tokens. Reasoning, in percent:

{table(heads, rows)}

![KCache]({FOLDER}/kcache.png)

- N = {top} with two layers whole is within 2 points of vanilla: {within(gap, 2)}.
- N = {low} without a whole layer is below vanilla: {verdict(fails)}.
- At N = {low} two whole layers are better than none: {verdict(first)}.

By kind of problem:

{of_kinds}"""


def throughput(data: dict[str, Any] | None, folder: pathlib.Path) -> str:
    if data is None:
        return ""
    batch = [row for row in data["rows"] if row["part"] == "batch"]
    prompt = [row for row in data["rows"] if row["part"] == "prompt"]
    kcache = [row for row in data["rows"] if row["part"] == "kcache"]
    text = [
        f"""## Throughput and the first token

*DMC paper, figure 5: throughput grows with the ratio (3.4 to 5 times); KCache paper: 40% more
throughput.* {data.get("device", "")}, random weights, bfloat16; `{data["command"]}`."""
    ]
    if batch:
        base = {row["context"]: row["tokens_per_second"] for row in batch if row["ratio"] == 1}
        rows = [
            [
                f"{row['context']:,}",
                str(row["ratio"]),
                str(row["batch"]),
                f"{row['step_ms']:.1f}",
                f"{row['tokens_per_second']:,.0f}",
                f"{row['tokens_per_second'] / base[row['context']]:.2f}",
                f"{100 * row['share_of_roofline']:.0f}%",
            ]
            for row in batch
            if row["context"] in base
        ]
        figures.throughput(batch, folder / "throughput.png")
        heads = (
            "context",
            "ratio",
            "batch",
            "step, ms",
            "tokens/s",
            "times dense",
            "of its roofline",
        )
        text.append(
            "Decode steps of Llama-3.1-8B's shape at the largest batch whose weights and cache fit "
            "into four fifths of the memory that JAX reserves (at most 1,024 sequences):"
        )
        text += [table(heads, rows), f"![throughput]({FOLDER}/throughput.png)"]
    if prompt:
        rows = [
            [
                f"{row['tokens']:,}",
                str(row["ratio"]),
                f"{row['seconds']:.2f}",
                f"{row['peak_cache_bytes'] / 1e9:.2f}",
            ]
            for row in prompt
        ]
        text.append(
            "Time to the first token of one prompt, everything kept (ratio 1) and with eviction at "
            "work inside the prompt:"
        )
        text.append(table(("prompt", "ratio", "seconds", "peak of the cache, GB"), rows))
    if kcache:
        base = kcache[0]["tokens_per_second"]
        rows = [
            [
                row["policy"],
                f"{row['context']:,}",
                str(row["batch"]),
                f"{row['tokens_per_second']:,.0f}",
                f"{row['tokens_per_second'] / base:.2f}",
            ]
            for row in kcache
        ]
        text.append(
            "Decoding after the prompt with Llama-2-7B's shape, at the largest batch of the plain "
            "cache that fits and at 1.85 times that for KCache:"
        )
        text.append(table(("", "context", "batch", "tokens/s", "times"), rows))
    return "\n\n".join(text)


def scratch(results: Results) -> str:
    logs = results.training("dmc-scratch")
    if not logs:
        return ""
    return f"""## From nothing

*DMC paper, appendix G: training with DMC from scratch gave negative results.* The same steps as the
retrofit at 4, from random weights: a language modelling loss of
{_last_loss(results, "dmc-scratch")} at the end, {_last_loss(results, DMC)} after the retrofit. No
model was trained from random weights on so few tokens without merging, so that this is no verdict
on DMC.

{table(HEADS, [row(results, "DMC at 4 from random weights", "dmc-scratch", "4")])}"""


def _last_loss(results: Results, system: str) -> str:
    logs = results.training(system)
    return last_figure(logs[0], "lm_loss", ".3f") if logs else "-"
