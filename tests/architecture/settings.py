"""The settings of our programs as a document may show them: flags, and defaults as text."""

import dataclasses


def flags_of(config: type) -> set[str]:
    """The flag of every setting, and of those that are on or off the one that switches them off."""
    shown = defaults_of(config)
    switches = {flag for flag, default in shown.items() if default in {"True", "False"}}
    return set(shown) | {flag.replace("--", "--no-", 1) for flag in switches}


def defaults_of(config: type) -> dict[str, str]:
    """Every setting's flag, and its default as it is written; "" for none."""
    fields = [field for field in dataclasses.fields(config) if field.name != "config"]
    return {f"--{field.name.replace('_', '-')}": _shown(field.default) for field in fields}


def _shown(default: object) -> str:
    if default is None:
        return ""
    return f"{default:g}" if isinstance(default, float) else str(default)
