"""A certificate authority for tests, and the certificates that it signs, as files."""

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import grpc
import trustme


@dataclass(frozen=True, slots=True)
class Pair:
    """A certificate and its key."""

    cert: Path
    key: Path


class Authority:
    """A CA of its own; `ca` is its certificate."""

    def __init__(self, directory: Path, name: str = "ca") -> None:
        self._authority = trustme.CA()
        self._directory = directory / name
        self._directory.mkdir()
        self.ca = self._directory / "ca.pem"
        self._authority.cert_pem.write_to_path(self.ca)

    def issue(
        self, name: str, *identities: str, begins: datetime | None = None, ends: datetime | None = None
    ) -> Pair:
        """A certificate for these hosts, for loopback by default. One of the same name is replaced."""
        made = self._authority.issue_cert(
            *(identities or ("localhost", "127.0.0.1")), not_before=begins, not_after=ends
        )
        pair = Pair(self._directory / f"{name}.pem", self._directory / f"{name}.key")
        pair.cert.write_bytes(b"".join(part.bytes() for part in made.cert_chain_pems))
        made.private_key_pem.write_to_path(pair.key)
        return pair

    def cluster_flags(self, pair: Pair) -> tuple[str, ...]:
        """What a process of a cluster is told, which has this certificate."""
        files = ("--cluster-tls-cert", pair.cert, "--cluster-tls-key", pair.key, "--cluster-tls-ca", self.ca)
        return tuple(map(str, files))

    def channel_credentials(self, pair: Pair | None = None) -> grpc.ChannelCredentials:
        """Those of a client that trusts this CA, and shows the certificate if it has one."""
        if pair is None:
            return grpc.ssl_channel_credentials(self.ca.read_bytes())
        return grpc.ssl_channel_credentials(
            self.ca.read_bytes(), pair.key.read_bytes(), pair.cert.read_bytes()
        )
