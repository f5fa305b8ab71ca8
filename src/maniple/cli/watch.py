"""The command `maniple watch`: a run seen from elsewhere."""

from pathlib import Path

import click

from maniple.watch.subject import Subject


@click.command()
@click.option("--web", is_flag=True, help="Serve a page for a browser (extra `watch`), until Ctrl-C.")
@click.option(
    "--listen",
    metavar="ADDRESS",
    default="127.0.0.1:0",
    show_default=True,
    help="With --web: where to serve it; port 0 is a free one. 0.0.0.0 lets other machines in.",
)
@click.option("--read-only", is_flag=True, help="With --web: the page takes no orders.")
@click.option("--open", "opens", is_flag=True, help="With --web: open it in a browser here.")
@click.option("--token-file", type=click.Path(path_type=Path), metavar="FILE", help="As for `maniple join`.")
@click.option("--certificate", type=click.Path(path_type=Path), metavar="FILE", help="As for `maniple join`.")
@click.argument("host")
def watch(
    *,
    host: str,
    web: bool,
    listen: str,
    read_only: bool,
    opens: bool,
    token_file: Path | None,
    certificate: Path | None,
) -> None:
    """Watch a run that goes on or has ended.

    HOST is a run folder that can be seen from here, or HOST:PORT.

    \b
      maniple watch runs/last --web
      maniple watch runs/last --web --listen 127.0.0.1:8080 --read-only
      maniple watch --token-file token node-07:29400 --web
    """
    with Subject(host, token_file, certificate) as subject:
        if web:
            from maniple.watch.web import show

            show(subject, listen, may_steer=not read_only, opens=opens)
