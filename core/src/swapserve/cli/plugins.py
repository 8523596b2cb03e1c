"""`serve plugins`: what is installed, from where, with which options, and what is broken."""

from __future__ import annotations

from collections.abc import Iterator

import click

from swapserve.plugins import PluginRecord, Plugins
from swapserve.spec import describe_options

HEADINGS = ("KIND", "NAME", "DISTRIBUTION", "VERSION", "IMPORT")


@click.command(short_help="List the plugins there are, and the broken ones.")
@click.option("--verbose", is_flag=True, help="Show the traceback of each plugin that is broken.")
def plugins(verbose: bool) -> None:
    """List every plugin that is installed: kind, name, distribution, version, time its import took, and options."""
    found = Plugins()
    rows: list[tuple[tuple[str, ...], list[str]]] = []
    for record in found.load_all():
        rows.extend(_rows(record, verbose))
    rows.sort(key=lambda row: row[0][:2])
    widths = [max(len(row[0][column]) for row in [(HEADINGS, []), *rows]) for column in range(len(HEADINGS))]
    click.echo("  ".join(name.ljust(width) for name, width in zip(HEADINGS, widths, strict=True)).rstrip())
    for cells, notes in rows:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip())
        for note in notes:
            click.echo(f"    {note}")


def _rows(record: PluginRecord, verbose: bool) -> Iterator[tuple[tuple[str, ...], list[str]]]:
    """The table's lines for one plugin: the cells of each, and what stands below it."""
    took = "built in" if record.import_seconds is None else f"{1000 * record.import_seconds:.0f} ms"
    origin = (record.distribution, record.version, took)
    kind, name = record.offers or ("watcher", record.name)
    if record.error is not None:
        trace = (record.traceback or "").rstrip().splitlines() if verbose else []
        yield (kind, name, *origin), [f"broken: {record.error}", *trace]
    elif not any(record.policies.values()):
        yield (kind, name, *origin), []
    for offered_kind, policies in record.policies.items():
        for policy in policies:
            yield (offered_kind, policy.name, *origin), describe_options(policy.Options)
