"""Settings: one frozen dataclass a service, filled from a TOML file's section and then from flags.

A field is made with `option(default, help)`; its name is the flag (`max_num_seqs` -> `--max-num-seqs`) and the
key in the file. A class that wants to know which file it was filled from has a field `config`. This module knows
no service and no setting.
"""

import argparse
import dataclasses
import inspect
import math
import sys
import tomllib
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from paceline.core.errors import ConfigError

C = TypeVar("C")


def option(default: Any, text: str, *, choices: tuple[str, ...] = ()) -> Any:
    """A setting with its default, a line of help, and the values it may take (any, when empty)."""
    return dataclasses.field(default=default, metadata={"help": text, "choices": choices})


def load_config(cls: type[C], argv: Sequence[str], *, prog: str, section: str, about: str) -> C:
    """The settings `cls` out of defaults, then `--config FILE`'s `[section]`, then the flags in `argv`.

    Exits with status 2 and one line on a wrong flag or file, as argparse does.
    """
    parser = _parser(cls, prog, section, about)
    given = {name: value for name, value in vars(parser.parse_args(argv)).items() if value is not None}
    config_file = given.get("config")
    if not _wants_its_file(cls):
        given.pop("config", None)
    try:
        from_file = read_section(cls, Path(config_file), section) if config_file else {}
        settings = {**from_file, **given}
        require_finite(settings)
        return cls(**settings)
    except ConfigError as error:
        parser.error(str(error))


def read_section(cls: type[Any], path: Path, section: str) -> dict[str, Any]:
    """The `[section]` of a TOML file, checked against the fields of `cls`; {} when the section is absent."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8")).get(section, {})
    except OSError as error:
        raise ConfigError(f"cannot read the config file {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    if not isinstance(table, dict):
        raise ConfigError(f"{path}: {section!r} must be a table, [{section}]")
    known = {field.name: field for field in _fields(cls)}
    where = f"{path}: [{section}]"
    for key in table.keys() - known.keys():
        raise ConfigError(f"{where} has no setting {key!r}; known: {', '.join(sorted(known))}")
    return {
        key: _checked(known[key], _value_type(cls, key), value, f"{where} {key}")
        for key, value in table.items()
    }


def config_from_args(cls: type[C], argv: Sequence[str]) -> C:
    """The settings `cls` out of flags alone; for tests and tools that build a service in their own process."""
    return load_config(cls, argv, prog="paceline", section="", about="")


class _OneLineParser(argparse.ArgumentParser):
    """A wrong flag is answered with one line; the usage is what --help shows."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (--help explains the flags)\n")


def _parser(cls: type[Any], prog: str, section: str, about: str) -> argparse.ArgumentParser:
    # No abbreviations: a flag that is added later must not change what an old command line means.
    parser = _OneLineParser(prog=prog, description=about, allow_abbrev=False)
    parser.add_argument(
        "--config", metavar="FILE", help=f"a TOML file; its [{section}] sets what the flags do not"
    )
    for field in _fields(cls):
        _add_flag(parser, field, _value_type(cls, field.name))
    return parser


def _add_flag(parser: argparse.ArgumentParser, field: "dataclasses.Field[Any]", kind: type) -> None:
    flag = "--" + field.name.replace("_", "-")
    text = field.metadata["help"].replace("%", "%%")
    if kind is bool:
        shown = f"{text} (default: {'on' if field.default else 'off'})"
        parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=None, help=shown)
        return
    shown = text if field.default in (None, "") else f"{text} (default: {field.default})"
    choices = field.metadata["choices"] or None
    metavar = None if choices else kind.__name__.upper()
    parser.add_argument(flag, type=kind, choices=choices, default=None, metavar=metavar, help=shown)


def _checked(field: "dataclasses.Field[Any]", kind: type, value: object, what: str) -> object:
    choices = field.metadata["choices"]
    if choices and value not in choices:
        raise ConfigError(f"{what} must be one of {', '.join(choices)}, not {value!r}")
    if kind is float and type(value) is int:
        return float(value)
    # Not isinstance: a bool is an int to Python, and a mistake to us.
    if type(value) is not kind:
        raise ConfigError(f"{what} must be a {kind.__name__}, not {value!r}")
    return value


def require_finite(settings: dict[str, Any]) -> None:
    """Python reads "nan" and "inf" as numbers, and no comparison with them refuses what it should."""
    for name, value in settings.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"--{name.replace('_', '-')} must be a number, not {value}")


def _wants_its_file(cls: type[Any]) -> bool:
    return any(field.name == "config" for field in dataclasses.fields(cls))


def _fields(cls: type[Any]) -> "tuple[dataclasses.Field[Any], ...]":
    """The settings, a class's own before those that it inherits; `config` names the file and cannot stand in it."""
    settings = (field for field in dataclasses.fields(cls) if field.name != "config")
    return tuple(sorted(settings, key=lambda field: _depth(cls, field.name)))


def _depth(cls: type[Any], name: str) -> int:
    return next(depth for depth, each in enumerate(cls.__mro__) if name in inspect.get_annotations(each))


def _value_type(cls: type[Any], name: str) -> type:
    """The type of a field; of `T | None`, T."""
    hint = typing.get_type_hints(cls, vars(sys.modules[cls.__module__]))[name]
    if isinstance(hint, types.UnionType):
        hint = next(arg for arg in typing.get_args(hint) if arg is not type(None))
    assert isinstance(hint, type), f"{cls.__name__}.{name} must be a plain type"
    return hint
