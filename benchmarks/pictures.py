"""The two pictures of the results, growth with n and tightness, on white for light and dark pages."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from timing import Row

__all__ = ["growth", "tightness"]

# Okabe and Ito's palette, which people with any colour vision tell apart; markers tell the rest.
_BLUE, _GREY = "#0072B2", "#8A8A8A"
_HUES = ("#D55E00", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#222222")
_MARKERS = "os^Dv<>Pp*Xh"


def growth(rows: Sequence[Row], path: Path) -> None:
    """Draw what the n-th spend costs, over an early one of Odograph's, with its spread."""
    points: dict[str, list[tuple[int, Row]]] = {}
    for row in rows:
        name, _, n = row.title.rpartition(", spend ")
        if name and not row.failed:
            points.setdefault(name, []).append((int(n.replace(",", "")), row))
    figure = Figure(figsize=(8.4, 5.2), layout="constrained", facecolor="white")
    axes = figure.subplots()
    # From the dearest down, so that the legend is in the order of the lines.
    order = sorted(points, key=lambda name: -points[name][-1][1].median)
    for i, name in enumerate(order):
        own = name.startswith("Odograph")
        sizes, found = zip(*points[name], strict=True)
        middle = [row.median for row in found]
        spread = [
            [row.median - row.least for row in found],
            [row.most - row.median for row in found],
        ]
        axes.errorbar(
            sizes,
            middle,
            yerr=spread,
            label=name,
            color=_BLUE if own else _HUES[i % len(_HUES)],
            marker=_MARKERS[i % len(_MARKERS)],
            linestyle=":" if "totals" in name else "-" if own else "--",
            linewidth=2.4 if own else 1.4,
            markersize=6,
            capsize=2,
        )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set(
        xlabel="n, the spends before; a line that ends early was cut after a minute",
        ylabel="cost of the next spend with its check,\nover an early one of Odograph's",
    )
    axes.set_title("The cost of the n-th adaptive spend", loc="left")
    axes.grid(visible=True, color="#E4E4E4")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right center", frameon=False, fontsize=9)
    figure.savefig(path, dpi=140, metadata={"Software": None})


def tightness(shares: Mapping[str, Mapping[str, Sequence[float]]], fixed: Collection[str], path: Path) -> None:
    """Draw, for every tool, the share of the optimum in each case; hollow where parameters must be fixed before."""
    sizes = [len(tools) for tools in shares.values()]
    figure = Figure(figsize=(8.4, 0.9 + 0.3 * sum(sizes)), layout="constrained", facecolor="white")
    panels = figure.subplots(len(shares), 1, sharex=True, gridspec_kw={"height_ratios": sizes})
    for axes, (title, tools) in zip(panels, shares.items(), strict=True):
        for place, (name, found) in enumerate(tools.items()):
            hue = _BLUE if name.startswith("Odograph") else _GREY if name in fixed else _HUES[0]
            axes.scatter(
                found,
                [place] * len(found),
                s=46,
                facecolors="white" if name in fixed else hue,
                edgecolors=hue,
                linewidths=1.4,
                alpha=0.85,
                zorder=3,
                clip_on=False,
            )
        axes.set_yticks(range(len(tools)), [*tools])
        axes.invert_yaxis()
        axes.set_title(title, loc="left", fontsize=11)
        axes.set_xlim(0, 1)
        axes.xaxis.set_major_formatter(PercentFormatter(1.0))
        axes.grid(visible=True, color="#E4E4E4")
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
    panels[-1].set_xlabel(
        "steps admitted, as a share of the optimum; a dot for each promise and step size\n"
        "filled: the answers may choose every next step and its cost\n"
        "hollow: promised only if everything was fixed in advance"
    )
    figure.savefig(path, dpi=140, metadata={"Software": None})
