"""The rules of the settings that say how a model is served and to whom, for a service and for whoever starts it."""

import ipaddress
from typing import Protocol

from paceline.core.errors import ConfigError
from paceline.runtime.memory import MemorySize

QUANTIZATIONS = ("none", "w8a8", "w4a16")


class Serving(Protocol):
    """Settings that a worker has, and that `./run up` hands on to it."""

    @property
    def kv_dtype(self) -> str:
        """Type of the KV cache, or "auto"."""
        ...

    @property
    def mla(self) -> str:
        """What MLA models keep: "expanded" or "latent"."""
        ...

    @property
    def quantization(self) -> str:
        """Of the weights; one of QUANTIZATIONS."""
        ...

    @property
    def exactness(self) -> str:
        """Either "exact" or "fast"."""
        ...

    @property
    def runner(self) -> str:
        """Either "torch" or "fake"."""
        ...

    @property
    def tp(self) -> int:
        """Processes that compute a model together, each a part of its heads."""
        ...

    @property
    def pp(self) -> int:
        """The same, where each has some of its layers."""
        ...

    @property
    def max_model_len(self) -> int:
        """Tokens; 0: the model's own limit."""
        ...

    @property
    def kv_memory(self) -> str:
        """See MemorySize.parse."""
        ...


def check_serving(settings: Serving) -> None:
    """Raises ConfigError for what cannot work, or would be ignored."""
    if settings.mla == "latent" and settings.exactness == "exact":
        raise ConfigError("--exactness exact serves MLA models with --mla expanded only")
    if settings.quantization != "none" and settings.exactness == "exact":
        raise ConfigError(
            f"--quantization {settings.quantization} is for fast mode: exact mode computes with all bits of the weights"
        )
    if settings.runner == "fake":
        _check_fake(settings)
    _check_parts(settings)
    if settings.max_model_len < 0:
        raise ConfigError(f"--max-model-len {settings.max_model_len} is negative; 0 is the model's own limit")
    if settings.max_model_len == 1:
        raise ConfigError("--max-model-len 1 leaves no room for an output token; it must be at least 2")
    MemorySize.parse(settings.kv_memory, "--kv-memory")


def _check_fake(settings: Serving) -> None:
    for name, value, default, lack in (
        ("mla", settings.mla, "expanded", "keeps no KV"),
        ("kv-dtype", settings.kv_dtype, "auto", "keeps no KV"),
        ("quantization", settings.quantization, "none", "has no weights"),
    ):
        if value != default:
            raise ConfigError(f"--{name} {value} needs --runner torch: the fake one {lack}")


def _check_parts(settings: Serving) -> None:
    for flag, number in (("--tp", settings.tp), ("--pp", settings.pp)):
        if number < 1:
            raise ConfigError(f"{flag} {number}: at least one process has to compute the model")
    if settings.tp == settings.pp == 1:
        return
    if settings.tp > 1 and settings.pp > 1:
        raise ConfigError("--tp and --pp: a model is computed in parts or in stages, not yet in both")
    asked = f"--tp {settings.tp}" if settings.tp > 1 else f"--pp {settings.pp}"
    if settings.exactness == "exact":
        raise ConfigError(f"--exactness exact is for one process: leave {asked} out")
    if settings.mla == "latent":
        raise ConfigError(f"--mla latent is for one process: leave {asked} out")
    if settings.quantization != "none":
        raise ConfigError(f"--quantization {settings.quantization} is for one process: leave {asked} out")
    if settings.runner == "fake":
        raise ConfigError(f"{asked} needs --runner torch: the fake one has neither heads nor layers")


def check_open(
    listen: str, tenants: str | None, *, allow_anonymous: bool, asks_for_certificate: bool = False
) -> None:
    """Raises ConfigError for a door that is open to other machines and asks nobody for a key, unless that is what was asked for."""
    if tenants and allow_anonymous:
        raise ConfigError(
            "--allow-anonymous contradicts --tenants, with which each call needs a key; leave one out"
        )
    if not (tenants or allow_anonymous or asks_for_certificate or is_private(listen)):
        raise ConfigError(
            f"on {listen} others than this machine can reach the server, and without keys it serves everybody; "
            "name its tenants with --tenants, ask for certificates with --tls-client-ca, or say --allow-anonymous"
        )


def is_private(listen: str) -> bool:
    """Whether nobody but this machine reaches an address."""
    if listen.startswith(("unix:", "unix-abstract:")):
        return True
    host = listen.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
