"""Certificates out of files: proven to work before anybody relies on them, and read again when they have changed.

It knows no service. What a certificate is for, the settings' names say.
"""

import ssl
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import grpc

from paceline.core.errors import ConfigError

# A handshake in memory needs three turns of each side at most.
_MAX_TURNS = 5
# What OpenSSL says of a certificate whose signer it does not know.
_UNKNOWN_SIGNER = frozenset({18, 19, 20, 21})


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Where certificate, key and a CA stand, and the settings that say so.

    The CA has signed the certificates of the peers, which have to show one. Without one they need none. In a cluster it has
    signed ours too.
    """

    cert: str
    key: str
    ca: str
    setting: str  # "--tls": --tls-cert, --tls-key
    ca_setting: str
    is_cluster: bool = False

    def check(self) -> bool:
        """Whether they are set; raises ConfigError where only some are that go together."""
        names = {f"{self.setting}-cert": self.cert, f"{self.setting}-key": self.key}
        if self.is_cluster:
            names[self.ca_setting] = self.ca
        missing = [name for name, file in names.items() if not file]
        if len(missing) == len(names):
            if self.ca:
                raise ConfigError(f"{self.ca_setting} means nothing without {self.setting}-cert")
            return False
        if missing:
            raise ConfigError(f"{', '.join(names)} go together; {' and '.join(missing)} is missing")
        return True


@dataclass(frozen=True, slots=True)
class Certificates:
    """What the files held when they were read, in PEM."""

    chain: bytes
    key: bytes
    ca: bytes | None


class CertificateSource:
    """The certificates of one side of a process. Raises ConfigError for what would not work."""

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self.current = read_certificates(files)
        self._served = self.current

    def read_again(self) -> None:
        """Takes the files as they are now, for connections from now on; raises ConfigError, and then all stays as it was."""
        self.current = read_certificates(self._files)

    def server_credentials(self) -> grpc.ServerCredentials:
        """For one server. It asks at every connection, on a thread of gRPC's own, what the certificates are by now."""
        return grpc.dynamic_ssl_server_credentials(
            _configuration(self._served),
            self._fresh,  # type: ignore[arg-type] # its type forgets that None means "no change"
            require_client_authentication=bool(self._files.ca),
        )

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """For a channel to a peer whose certificate the CA has signed."""
        current = self.current
        return grpc.ssl_channel_credentials(current.ca, current.key, current.chain)

    def _fresh(self) -> "grpc.ServerCertificateConfiguration | None":
        current = self.current
        if current is self._served:
            return None
        self._served = current
        return _configuration(current)


def read_certificates(files: TlsFiles) -> Certificates:
    """What the files hold; raises ConfigError, which names the setting, for what no peer would take."""
    certificates = Certificates(
        chain=_read(f"{files.setting}-cert", files.cert),
        key=_read(f"{files.setting}-key", files.key),
        ca=_read(files.ca_setting, files.ca) if files.ca else None,
    )
    _prove(files)
    return certificates


def _configuration(certificates: Certificates) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration(
        [(certificates.key, certificates.chain)], root_certificates=certificates.ca
    )


def _read(setting: str, file: str) -> bytes:
    try:
        return Path(file).read_bytes()
    except OSError as error:
        raise ConfigError(f"{setting}: cannot read {file}: {error.strerror}") from error


def _prove(files: TlsFiles) -> None:
    """Shakes hands with itself, as a peer would with it; in a cluster both sides show the certificate."""
    server, client = _context(files, ssl.PROTOCOL_TLS_SERVER), _context(files, ssl.PROTOCOL_TLS_CLIENT)
    if not files.is_cluster:
        # Clients judge by roots of their own, which we do not know; but no root makes up for a date that has passed.
        client.load_verify_locations(files.cert)
        client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        server.verify_mode = ssl.CERT_NONE
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (client.wrap_bio(down, up), server.wrap_bio(up, down, server_side=True))
    try:
        for _ in range(_MAX_TURNS):
            for end in ends:
                with suppress(ssl.SSLWantReadError):
                    end.do_handshake()
    except ssl.SSLCertVerificationError as error:
        problem = error.verify_message
        if files.is_cluster and error.verify_code in _UNKNOWN_SIGNER:
            problem = f"not signed by the CA in {files.ca} ({files.ca_setting})"
        raise ConfigError(
            f"{files.setting}-cert: {files.cert} would be refused by peers: {problem}"
        ) from error
    except ssl.SSLError as error:
        raise ConfigError(
            f"{files.setting}-cert: {files.cert} cannot be used: {error.reason or error}"
        ) from error


def _context(files: TlsFiles, protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_cert_chain(files.cert, files.key, password=_no_password)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ConfigError(
                f"{files.setting}-key: the key in {files.key} does not belong to the certificate in {files.cert}"
            ) from error
        raise ConfigError(
            f"{files.setting}-cert: {files.cert} and {files.key} are not a certificate and its key, in PEM and without a password"
        ) from error
    if files.ca:
        try:
            context.load_verify_locations(files.ca)
        except ssl.SSLError as error:
            raise ConfigError(f"{files.ca_setting}: {files.ca} holds no certificate in PEM") from error
    return context


def _no_password() -> str:
    """In place of OpenSSL's question to the terminal, for which nobody waits."""
    return ""
