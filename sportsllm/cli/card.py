"""The command `card`. Heavy imports are inside."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from sportsllm.cli import flags


def card(
    directory: flags.Directory,
    results: Annotated[
        list[Path] | None,
        typer.Argument(help="Results to show: of `bench --out` and `eval --json`.", show_default=False),
    ] = None,
    license: Annotated[
        str | None, typer.Option(help="Licence, by the hub's name.", show_default="as carried over")
    ] = None,
    base_model: Annotated[
        str | None, typer.Option(help="Model it was made from, owner/name.", show_default="as carried over")
    ] = None,
    language: Annotated[
        list[str] | None,
        typer.Option(help="Language of its text, for example en; may be repeated.", show_default="as carried over"),
    ] = None,
) -> dict[str, Any]:
    """Write a directory's model card (README.md) again, with measurements and a licence."""
    from sportsllm.console import output
    from sportsllm.formats.artifact import write_card
    from sportsllm.formats.card import CARD
    from sportsllm.formats.card_figures import check_results
    from sportsllm.formats.front_matter import read_front_matter
    from sportsllm.formats.json_files import read_json
    from sportsllm.formats.lineage import ancestors
    from sportsllm.formats.manifest import read_manifest

    manifest = read_manifest(directory)
    read = {path: read_json(path) for path in results or []}
    check_results(directory, ancestors(manifest, directory), read)
    stated: dict[str, str | list[str]] = {"license": license or "", "base_model": base_model or ""}
    stated["language"] = language or []
    given = {key: value for key, value in stated.items() if value}
    write_card(directory, list(read.values()), given)
    path = directory / CARD
    fields = read_front_matter(path)
    unknown = [name for name in ("license", "base_model", "language") if name not in fields]
    output().print(
        f"{path}: {path.stat().st_size / 1e3:.1f} kB, {len(read)} results"
        + (f"; not known, so left out: {', '.join(unknown)}" if unknown else ""),
        markup=False,
        soft_wrap=True,
    )
    return {"out": str(path), "front_matter": fields, "results": [str(path) for path in read], "left_out": unknown}
