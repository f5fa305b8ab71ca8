"""A command whose options may also come from variables and files; what is typed counts most.

command line > MANIPLE_<KEY> > session file > ./.maniple.yaml > ~/.config/maniple.yaml > default
"""

import re
from typing import Any

import click

from maniple.errors import InvalidArgument
from maniple.session.file import Setting
from maniple.session.keys import option_keys, shown
from maniple.session.session import Session


class Configured(click.Command):
    """A command that settles its options from all sources before it begins."""

    def __init__(self, *args: Any, **values: Any) -> None:
        super().__init__(*args, **values)
        self.params.append(
            click.Option(
                ["--show-settings"],
                is_flag=True,
                is_eager=True,
                expose_value=False,
                help="Print each setting and where it comes from, and start nothing.",
            )
        )

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the command line, and what it leaves open from the other sources."""
        typed = _typed(self, ctx, args)
        help_option = self.get_help_option(ctx)
        if ctx.resilient_parsing or (help_option is not None and help_option.name in typed):
            return super().parse_args(ctx, args)
        runs_script = any(param.name == "script" for param in self.params)
        session = Session(ctx, typed, option_keys(self), _all_options(ctx), runs_script=runs_script)
        ctx.default_map = session.defaults
        rest = super().parse_args(ctx, args)
        session.apply(ctx.params)
        if "show_settings" in typed:
            click.echo(session.table(ctx.params))
            ctx.exit(0)
        ctx.meta[__name__] = session.settled
        return rest

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; an error about a value that was not typed tells where that value stands."""
        try:
            return super().invoke(ctx)
        except InvalidArgument as error:
            settled: dict[str, Setting] = ctx.meta[__name__]
            told = [
                f"{key} is {shown(setting.value)!r} by {setting.origin}"
                for key, setting in settled.items()
                if re.search(rf"\b{key.replace('_', '[-_]')}\b", str(error), re.IGNORECASE)
                and shown(setting.value) in str(error)
            ]
            error.args = (f"{error} ({'; '.join(told)})" if told else str(error),)
            raise


def _typed(command: click.Command, ctx: click.Context, args: list[str]) -> dict[str, Any]:
    """What the command line gives, by the names of parameters, in its own words."""
    found = command.make_parser(ctx).parse_args(args=list(args))[0]
    return {name: value for name, value in found.items() if isinstance(value, str | bool | int | list | tuple)}


def _all_options(ctx: click.Context) -> dict[str, click.Option]:
    """The options of all commands that read files: one file may serve several of them."""
    root = ctx.find_root().command
    commands = root.commands.values() if isinstance(root, click.Group) else [root]
    return {
        key: option
        for command in commands
        if isinstance(command, Configured)
        for key, option in option_keys(command).items()
    }
