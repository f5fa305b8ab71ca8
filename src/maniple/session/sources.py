"""The sources of settings beside the command line: variables, the session file and the files for all runs."""

from contextlib import suppress
from pathlib import Path

import click

from maniple.errors import require_printable
from maniple.place import personal_settings, set_by_person, setting_variable
from maniple.session.file import Setting, Untrusted, read_settings
from maniple.session.keys import check_found, check_keys, convert, is_command, translate

_OF_FOLDER = Path(".maniple.yaml")


def from_variables(context: click.Context, options: dict[str, click.Option]) -> dict[str, Setting]:
    """What the environment says about these options."""
    settings: dict[str, Setting] = {}
    for key, text in set_by_person(options).items():
        option = options[key]
        is_many = (option.multiple or option.nargs != 1) and not is_command(option)
        settings[key] = Setting(tuple(option.type.split_envvar_value(text)) if is_many else text, setting_variable(key))
        convert(context, key, option, settings[key])  # tells now what is wrong with it
    return settings


def from_file(
    context: click.Context, path: Path, options: dict[str, click.Option], *, is_general: bool = False
) -> tuple[dict[str, Setting], list[str]]:
    """What a file says, checked whole, and a line about each of its words that was translated."""
    is_found = is_general and path == _OF_FOLDER
    try:
        settings = read_settings(path, is_general=is_general, is_found=is_found)
    except Untrusted as error:
        return {}, [f"{path} is ignored: {error}."]
    check_keys(settings, options)
    for key, setting in settings.items():
        for text in (setting.value,) if isinstance(setting.value, str) else setting.value:
            if key != "args":  # these are the script's own
                require_printable(f"{setting.origin}: {key}", text)
    settings, notes = translate(settings)
    if is_found:
        check_found(settings)
    for key, setting in settings.items():
        if key in options:
            convert(context, key, options[key], setting)  # also if another source counts more
    return settings, notes


def general_files() -> list[Path]:
    """The files for all runs that are there: of this folder, and of this person."""
    return [path for path in (_OF_FOLDER, personal_settings()) if _is_there(path)]


def _is_there(path: Path) -> bool:
    with suppress(OSError):  # a home that is not ours
        return path.exists()
    return False
