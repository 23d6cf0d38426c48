"""The table and the picture of a comparison."""

import pathlib
from collections.abc import Sequence

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from comparison.measure import Measured


def show(console: Console, rows: Sequence[Measured]) -> None:
    """Prints the table, ratio by ratio, the least loss first."""
    dense = rows[0]
    table = Table(title="Held-out text, decoded token by token from the paged cache", box=SIMPLE)
    table.add_column("cache", no_wrap=True)
    scored = any(row.accuracy is not None for row in rows)
    names = ("nats/token", "above dense", "live", "peak", "reads", "", "kB", "peak kB")
    for name in (*names, *(("solved",) if scored else ())):
        table.add_column(name, justify="right", no_wrap=True)
    ordered = sorted(rows, key=lambda row: (row.ratio, row.failed is not None, row.increase))
    for index, row in enumerate(ordered):
        last = index + 1 == len(ordered) or ordered[index + 1].ratio != row.ratio
        if row.failed is not None:
            table.add_row(row.name, "not possible", end_section=last)
            continue
        cells = [
            f"{row.nats:.4f} ±{row.error:.4f}",
            f"{row.increase:+.4f} ±{row.increase_error:.4f}",
            f"{row.live:.0f}",
            f"{row.peak:.0f}",
            f"{row.reads:,.0f}",
            f"÷{dense.reads / row.reads:.2f}",
            f"{row.bytes / 1e3:.0f}",
            f"{row.peak_bytes / 1e3:.0f}",
        ]
        if row.accuracy is not None:
            cells.append(f"{row.accuracy:.1%}")
        table.add_row(row.name, *cells, end_section=last)
    console.print(table)
    console.print(
        "Averages over sequences, layers and KV heads. reads: entries read by all steps of a\n"
        "sequence; where query heads choose for themselves (Quest, KCache), each one's count. kB:\n"
        "pages and policy state of a sequence, at its end and at most. ± one standard error over\n"
        "sequences; above dense is of the difference.",
        highlight=False,
    )


def picture(path: pathlib.Path, rows: Sequence[Measured], *, title: str) -> None:
    """Draws the loss above dense against what was measured of reads, live tokens and bytes."""
    from matplotlib.figure import Figure

    dense, others = rows[0], [row for row in rows[1:] if row.failed is None]
    labels = list(dict.fromkeys(row.label for row in others))
    figure = Figure(figsize=(15, 5.6), layout="constrained")
    figure.suptitle(title)
    panels = (
        ("reads", "times fewer reads"),
        ("peak", "times fewer live tokens at the peak"),
        ("bytes", "times fewer bytes at the end"),
    )
    markers = "osD^v<>PX*hp"
    for axes, (field, text) in zip(figure.subplots(1, 3, sharey=True), panels, strict=True):
        for number, label in enumerate(labels):
            points = sorted(
                (getattr(dense, field) / getattr(row, field), row.increase)
                for row in others
                if row.label == label
            )
            axes.plot(
                *zip(*points, strict=True),
                marker=markers[number % len(markers)],
                color=f"C{number % 10}",
                linestyle="-" if number < 10 else "--",
                markersize=5,
                linewidth=1,
                label=label,
            )
        axes.axhline(0, color="#222222", linewidth=0.8)
        axes.set_xscale("log", base=2)
        axes.set_yscale("symlog", linthresh=0.01)
        axes.set_xlabel(text)
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("nats a token above dense")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside right upper")
    figure.savefig(path, dpi=120)
