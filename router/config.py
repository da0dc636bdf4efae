"""Settings of the router."""

from dataclasses import dataclass
from typing import cast

from paceline.core.errors import ConfigError
from paceline.prefix_index.redis_url import parse_redis_url
from paceline.runtime.cluster_settings import ClusterSettings, check_cluster
from paceline.runtime.config import option
from paceline.runtime.metrics_server import check_metrics_port
from paceline.runtime.serving import check_open, is_private
from paceline.runtime.tls import TlsFiles
from router.costs import RouteCosts
from router.in_time import Bounds
from router.placement import DisaggregateMode, Rules
from router.places import Place, parse_places
from router.policies import POLICIES, PlacementPolicy

_AT_LEAST_ONE = (
    "max_requests",
    "max_request_bytes",
    "max_prompt_bytes",
    "default_max_tokens",
    "max_attempts",
    "max_attempts_in_all",
    "limiter_routers",
)


@dataclass(frozen=True, slots=True)
class RouterConfig(ClusterSettings):
    """One router. A setting's name is its flag and its key in the config file."""

    listen: str = option("127.0.0.1:50051", "address to serve on, host:port")
    model: str = option(
        "", "directory of the model: its tokenizer and chat template are used, not its weights"
    )
    prefill: str = option(
        "",
        "where the prefill workers are, separated by commas: host:port, unix:/path, dns:NAME:PORT for all that a name has, "
        "or redis for those that register",
    )
    decode: str = option("", "where the decode workers are, in the same way")
    discovery_interval_s: float = option(
        2.0, "seconds between two questions to DNS or Redis about where workers are"
    )
    redis: str = option("", "the prefix table, redis://... or another form of URL; empty: none")
    lookup_budget_s: float = option(
        0.005, "seconds a look-up in the prefix table may take; a later answer counts as none"
    )
    disaggregate: str = option(
        "auto",
        "where prompts are computed: always on a prefill worker, never, or auto (placement decides)",
        choices=("always", "auto", "never"),
    )
    placement: str = option("prefix-aware", "how workers are chosen", choices=tuple(POLICIES))
    handover_tokens: int = option(
        RouteCosts().handover_tokens,
        "with --disaggregate auto: what a hand-over costs beside its blocks, in prompt tokens computed meanwhile",
    )
    cache_salt_file: str = option(
        "",
        "a file with a secret, the same for all routers: tenants share no cached block; empty: all is shared",
    )
    public_prefixes: str = option(
        "",
        'what tenants share all the same: a JSON Lines file, {"name": .., "token_ids": [..]} a line; empty: none',
    )
    tls_cert: str = option("", "certificate that clients see, in PEM; with it they need TLS")
    tls_key: str = option("", "the key of --tls-cert, in PEM, without a password")
    tls_client_ca: str = option("", "a CA, in PEM: clients must show a certificate that it has signed")
    plain_listen: str = option(
        "",
        "with --tls-cert: serve also here without TLS, on loopback or unix:/path, for probes on this machine",
    )
    tenants: str = option(
        "",
        "a TOML file with the tenants, their API keys' hashes and limits; read again on SIGHUP; empty: no keys",
    )
    allow_anonymous: bool = option(
        default=False, text="without --tenants: listen also where other machines reach it"
    )
    limiter_budget_s: float = option(
        0.05,
        "seconds that Redis may take to say whether a tenant's rate allows a request; then it is decided here",
    )
    limiter_routers: int = option(
        2, "routers among which a tenant's rate is divided while Redis is away, and each decides alone"
    )
    metrics_port: int = option(
        0, "port of the metrics, on the host of --listen; 0: any that is free, -1: none"
    )
    max_requests: int = option(256, "requests under way at once; more are refused")
    max_request_bytes: int = option(256 << 20, "bytes of the requests under way at once; more are refused")
    max_delay_s: float = option(
        60.0, "seconds that others may make a request wait for its first token; more are refused; 0: no bound"
    )
    realtime_ttft_s: float = option(
        0.0, "seconds within which REALTIME requests are promised their first token; others give way; 0: none"
    )
    max_prompt_bytes: int = option(1 << 20, "longest prompt, in bytes of text")
    default_max_tokens: int = option(256, "output tokens of a request that does not say")
    max_attempts: int = option(
        3, "times in a row that a request is tried when workers fail before they decode"
    )
    max_attempts_in_all: int = option(12, "times in all that a request is tried when workers fail")
    recovery_wait_s: float = option(20.0, "seconds a request waits for a worker to come back before it fails")
    max_buffered_events: int = option(
        1024, "messages with tokens that a slow client may leave unread before its request ends"
    )
    message_us: int = option(
        150,
        "microseconds that a message to a client costs: each stream sends at most every so many times the number of streams; 0: every token at once",
    )
    max_unread_s: float = option(
        30.0, "seconds that a slow client may take nothing of its answer before its request ends"
    )
    grace_s: float = option(30.0, "seconds that requests under way get to finish after SIGTERM")
    log_level: str = option(
        "info", "least level that is logged", choices=("debug", "info", "warning", "error")
    )

    def __post_init__(self) -> None:
        """Refuses what cannot work."""
        for name in _AT_LEAST_ONE:
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, not {getattr(self, name)}")
        check_metrics_port(self.metrics_port)
        if self.redis:
            parse_redis_url(self.redis)
        for name in ("lookup_budget_s", "limiter_budget_s", "discovery_interval_s", "max_unread_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(
                    f"--{name.replace('_', '-')} must be more than 0, not {getattr(self, name):g}"
                )
        self._check_door()
        check_cluster(self, peers=[place.address for place in self._places if place.kind != "redis"])
        for name in ("max_delay_s", "realtime_ttft_s", "message_us"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ConfigError(
                    f"--{name.replace('_', '-')} must be 0 or more, not {getattr(self, name):g}"
                )
        if self.handover_tokens < 0:
            raise ConfigError(f"--handover-tokens must be 0 or more, not {self.handover_tokens}")
        if not self.model:
            raise ConfigError("--model is missing: name the directory of a model")
        self._check_places()

    def _check_places(self) -> None:
        if not self.decode_places:
            raise ConfigError("--decode is missing: name at least one decode worker's address")
        if self.disaggregate == "always" and not self.prefill_places:
            raise ConfigError(
                "--disaggregate always needs --prefill: name at least one prefill worker's address"
            )
        if not self.redis and any(place.kind == "redis" for place in self._places):
            raise ConfigError("workers that register need --redis: name the Redis where they do")

    def _check_door(self) -> None:
        asks_for_certificate = self.public_tls.check() and bool(self.tls_client_ca)
        check_open(
            self.listen,
            self.tenants,
            allow_anonymous=self.allow_anonymous,
            asks_for_certificate=asks_for_certificate,
        )
        if self.plain_listen and not self.tls_cert:
            raise ConfigError("--plain-listen means nothing without --tls-cert")
        if self.plain_listen and not is_private(self.plain_listen):
            raise ConfigError(
                f"--plain-listen {self.plain_listen}: others than this machine would reach it; use loopback or unix:/path"
            )

    @property
    def public_tls(self) -> TlsFiles:
        """What clients see of TLS."""
        return TlsFiles(self.tls_cert, self.tls_key, self.tls_client_ca, "--tls", "--tls-client-ca")

    @property
    def mode(self) -> DisaggregateMode:
        """`disaggregate`, whose values have been checked."""
        return cast("DisaggregateMode", self.disaggregate)

    @property
    def placement_rules(self) -> Rules:
        """By what requests are placed."""
        policy = cast("PlacementPolicy", self.placement)
        return Rules(self.mode, policy, RouteCosts(handover_tokens=self.handover_tokens))

    @property
    def _places(self) -> tuple[Place, ...]:
        return self.prefill_places + self.decode_places

    @property
    def bounds(self) -> Bounds:
        """Within what requests are served, or refused."""
        return Bounds(self.max_delay_s, self.realtime_ttft_s)

    @property
    def prefill_places(self) -> tuple[Place, ...]:
        """Where prefill workers are."""
        return parse_places(self.prefill, "--prefill")

    @property
    def decode_places(self) -> tuple[Place, ...]:
        """Where decode workers are."""
        return parse_places(self.decode, "--decode")
