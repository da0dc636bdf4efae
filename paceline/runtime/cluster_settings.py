"""The settings by which the processes of a cluster know each other; the same for router and workers."""

from collections.abc import Iterable
from dataclasses import dataclass

from paceline.core.errors import ConfigError
from paceline.runtime.config import option
from paceline.runtime.membership import Membership, read_token
from paceline.runtime.serving import is_private
from paceline.runtime.tls import CertificateSource, TlsFiles


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """What a service's own settings come on top of."""

    cluster_token_file: str = option(
        "",
        "a file with a secret that each call between processes of the cluster brings, the same for all of them",
    )
    cluster_tls_cert: str = option(
        "", "certificate of this process for the others of its cluster, in PEM; with it they speak mutual TLS"
    )
    cluster_tls_key: str = option("", "the key of --cluster-tls-cert, in PEM, without a password")
    cluster_tls_ca: str = option(
        "", "the CA that has signed the certificates of all processes of the cluster, in PEM"
    )
    cluster_tls_name: str = option(
        "", "a name that each worker's certificate has; empty: that of the host in the worker's address"
    )
    allow_plaintext: bool = option(
        default=False,
        text="without --cluster-tls-*: let tokens and prompts pass between machines in the clear",
    )

    @property
    def cluster_tls(self) -> TlsFiles:
        """The certificates of this side."""
        return TlsFiles(
            cert=self.cluster_tls_cert,
            key=self.cluster_tls_key,
            ca=self.cluster_tls_ca,
            setting="--cluster-tls",
            ca_setting="--cluster-tls-ca",
            is_cluster=True,
        )

    def membership(self) -> Membership:
        """Reads the files; raises ConfigError for what would not work."""
        return Membership(
            token=read_token(self.cluster_token_file),
            certificates=CertificateSource(self.cluster_tls) if self.cluster_tls.check() else None,
            peer_name=self.cluster_tls_name,
            allow_plaintext=self.allow_plaintext,
        )


def check_cluster(settings: ClusterSettings, *, listen: str = "", peers: Iterable[str] = ()) -> None:
    """Raises ConfigError for a worker that would serve strangers on `listen`, and for calls to `peers` that others could read."""
    has_tls = settings.cluster_tls.check()
    if settings.cluster_tls_name and not has_tls:
        raise ConfigError("--cluster-tls-name means nothing without --cluster-tls-cert")
    if has_tls and settings.allow_plaintext:
        raise ConfigError("--allow-plaintext contradicts --cluster-tls-cert; leave one out")
    if has_tls:
        return
    if listen and not is_private(listen) and not (settings.allow_plaintext and settings.cluster_token_file):
        raise ConfigError(
            f"on {listen} other machines reach this worker, and nothing keeps strangers out; set --cluster-tls-cert, "
            "--cluster-tls-key and --cluster-tls-ca, or, in a network that nobody else can read, "
            "--cluster-token-file with --allow-plaintext"
        )
    for peer in peers:
        if not is_private(peer) and not settings.allow_plaintext:
            raise ConfigError(
                f"the worker at {peer} is on another machine, and without TLS prompts would go there in the clear; set "
                "--cluster-tls-cert, --cluster-tls-key and --cluster-tls-ca, or, in a network that nobody else can read, "
                "--allow-plaintext"
            )
