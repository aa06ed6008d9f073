"""`odograph figures`: the paper's figures and ours, as pictures and as numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from odograph.cli.options import AsJson, say
from odograph.figures import PANELS, draw_all

__all__ = ["figures"]


def figures(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="NAME", help=f"Which: {', '.join(PANELS)}. All if left out.")
    ] = None,
    *,
    out: Annotated[Path, typer.Option(help="The folder to write into.")] = Path("figures"),
    json: AsJson = False,
) -> None:
    """Draw the paper's figures and ours: each as PNG and SVG, with its numbers as CSV."""
    files = [str(file) for file in draw_all(out, names or None)]
    say({"files": files}, "\n".join(files), as_json=json)
