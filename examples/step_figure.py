"""Draws the time of a verify pass against its nodes."""

from __future__ import annotations

import os

from step_suite import STAGES, Report


def draw(report: Report, device: str, path: str | os.PathLike):
    """Writes the figure: stages stacked with the floor's line at the curve's prefix, and a line a prefix.

    Raises:
      ImportError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    steps = sorted(
        (s for s in report.steps if s.prefix == report.curve_prefix), key=lambda s: s.nodes
    )
    nodes = [s.nodes for s in steps]
    layers = [[max(s.full_times[name], 0) / 1e3 for s in steps] for name in STAGES]
    left.stackplot(nodes, layers, labels=STAGES)
    if all(s.full_floors for s in steps):
        floor = [sum(s.full_floors.values()) / 1e3 for s in steps]
        left.plot(nodes, floor, "k--", label="floor")
    left.set_title(f"stages, prefix {report.curve_prefix}")
    for prefix in sorted({s.prefix for s in report.steps}):
        line = sorted(
            (s.nodes, sum(s.full_times.values())) for s in report.steps if s.prefix == prefix
        )
        right.plot([n for n, _ in line], [t / 1e3 for _, t in line], "o-", label=f"prefix {prefix}")
    right.plot(nodes, [t / 1e3 for t in report.cost_curve.idle], "k:", label="roots alone")
    right.set_title("whole pass")
    for axes in (left, right):
        axes.set_xlabel("nodes a request")
        axes.set_ylabel("milliseconds")
        axes.set_ylim(bottom=0)
        axes.legend()
    figure.suptitle(
        f"{device}: {report.full_layers} layers, extrapolated from {report.layers}; batch {report.batch}"
    )
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
