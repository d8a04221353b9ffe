"""Draw a benchmark's JSON as PNG: ``python -m benchmarks.plot benchmarks/results/fig_13*.json``.

It reads the JSON document and nothing else.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

COLOURS = 10
MARKERS = "os^Dv"
"""Where there are more series than colours, the next ones have another marker."""


def draw(document: dict[str, Any], path: Path) -> None:
    """One line for each series, over the first numeric label of its points."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5))
    series: dict[str, list[dict[str, Any]]] = {}
    for point in document["points"]:
        series.setdefault(str(point["series"]), []).append(point)
    label = next(
        name
        for name, value in document["points"][0].items()
        if name != "series" and isinstance(value, int | float)
    )
    for index, (name, points) in enumerate(series.items()):
        style = "--" if "raw" in name else "-"
        axes.plot(
            [point[label] for point in points],
            [point["median"] for point in points],
            style,
            marker=MARKERS[index // COLOURS % len(MARKERS)],
            label=name,
        )
    axes.set_xlabel(label)
    axes.set_ylabel(document["unit"])
    axes.set_ylim(bottom=0)
    axes.set_title(document["title"])
    machine = document["machine"]
    figure.text(
        0.01, 0.01, f"{machine['cores']} cores, {machine['cpu']}; {document['at']}", fontsize=7
    )
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small" if len(series) <= COLOURS else 4)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    """Draw each file that is named."""
    for name in sys.argv[1:]:
        source = Path(name)
        target = source.with_suffix(".png")
        draw(json.loads(source.read_text()), target)
        print(target)


if __name__ == "__main__":
    main()
