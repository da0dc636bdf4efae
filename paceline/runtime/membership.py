"""Who belongs to the cluster: how a process of ours proves it to the others, and refuses whoever cannot.

Two proofs, each enough by itself, and both demanded where both are set: a certificate that the cluster's CA has signed (mutual TLS),
and a secret that goes with each call.
"""

import hmac
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from math import inf
from pathlib import Path
from typing import Any, Final, Self, TypeAlias, cast

import grpc

from paceline.core.clock import Clock, monotonic
from paceline.core.errors import ConfigError, PeerLostError, PeerUnknownError
from paceline.runtime.grpc_status import abort_with
from paceline.runtime.log import get_logger
from paceline.runtime.serving import is_private
from paceline.runtime.tls import CertificateSource

CLUSTER_TOKEN: Final = "paceline-cluster-token"  # noqa: S105 - the name of the metadata
TOKEN_SETTING: Final = "--cluster-token-file"  # noqa: S105 - the name of a setting
_MIN_TOKEN_BYTES, _MAX_TOKEN_BYTES = 32, 256
# Probes ask whether we live and can be given work; they know no secrets, and learn none.
_OPEN_TO_ALL = "/grpc.health.v1.Health/"
_TELL_EVERY_S = 60.0
_Options = Sequence[tuple[str, int | str]]

log = get_logger()


class Strangers:
    """Calls that have not brought the token. The log has a line a minute at most, however often somebody knocks."""

    def __init__(self, clock: Clock = monotonic) -> None:
        self.num_refused = 0
        self._clock = clock
        self._told_s = -inf

    def note(self, peer: str) -> None:
        """One more."""
        self.num_refused += 1
        if self._clock() - self._told_s >= _TELL_EVERY_S:
            self._told_s = self._clock()
            log.warning("stranger_refused", peer=peer, num_refused=self.num_refused)


class Membership:
    """One process's. Without certificates and token it proves nothing and asks for nothing, as on a machine of one's own."""

    def __init__(
        self,
        *,
        token: str = "",
        certificates: CertificateSource | None = None,
        peer_name: str = "",
        allow_plaintext: bool = False,
    ) -> None:
        self._token = token
        self._certificates = certificates
        self._peer_name = peer_name
        self._allow_plaintext = allow_plaintext
        self.strangers = Strangers()

    @property
    def encrypts(self) -> bool:
        """Whether what passes between processes cannot be read on the way."""
        return self._certificates is not None

    def open_channel(self, address: str, options: _Options) -> grpc.aio.Channel:
        """A channel whose calls prove who we are. Raises PeerLostError where they would cross a network in the clear."""
        if self._certificates is None:
            if not (is_private(address) or self._allow_plaintext):
                raise PeerLostError(
                    f"{address} is not on this machine, and without TLS prompts would go there in the clear; "
                    "set --cluster-tls-cert, --cluster-tls-key and --cluster-tls-ca on all processes"
                )
            return self._signed(grpc.aio.insecure_channel(address, options=options))
        if self._peer_name:
            options = (*options, ("grpc.ssl_target_name_override", self._peer_name))
        credentials = self._certificates.channel_credentials()
        return self._signed(grpc.aio.secure_channel(address, credentials, options=options))

    def server_credentials(self) -> grpc.ServerCredentials | None:
        """What a server demands of a connection; None: nothing."""
        return self._certificates.server_credentials() if self._certificates is not None else None

    def interceptors(self) -> tuple[grpc.aio.ServerInterceptor, ...]:
        """What a server demands of a call."""
        return (_Gate(self._token, self.strangers),) if self._token else ()

    def read_again(self) -> None:
        """The certificates, as they are now; raises ConfigError, and then all stays as it was."""
        if self._certificates is not None:
            self._certificates.read_again()

    def _signed(self, channel: grpc.aio.Channel) -> grpc.aio.Channel:
        return _SignedChannel(channel, self._token) if self._token else channel


def read_token(file: str) -> str:
    """The cluster's secret, without the white space around it; "" for no file. Raises ConfigError, which does not show it."""
    if not file:
        return ""
    try:
        token = Path(file).read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"{TOKEN_SETTING}: cannot read {file}: {error.strerror}") from error
    text = token.decode("ascii", errors="replace")
    is_plain = token.isascii() and text.isprintable() and " " not in text
    if not is_plain or not _MIN_TOKEN_BYTES <= len(token) <= _MAX_TOKEN_BYTES:
        raise ConfigError(
            f"{TOKEN_SETTING}: {file} must hold {_MIN_TOKEN_BYTES} to {_MAX_TOKEN_BYTES} printable characters without spaces; "
            "make a token with: openssl rand -hex 32"
        )
    return text


_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
_Continuation: TypeAlias = "Callable[[grpc.HandlerCallDetails], Awaitable[_Handler | None]]"


class _Gate(grpc.aio.ServerInterceptor):
    """Lets calls through that bring the token."""

    def __init__(self, token: str, strangers: Strangers) -> None:
        self._token = token.encode()
        self._strangers = strangers
        # Whatever the method: it answers before it has read a message.
        self._refusal: _Handler = grpc.stream_stream_rpc_method_handler(self._refuse)

    async def intercept_service(
        self, continuation: _Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> "_Handler | None":
        """The method's own handler, or one that refuses."""
        details = handler_call_details
        if details.method.startswith(_OPEN_TO_ALL) or self._is_ours(details):
            return await continuation(details)
        return self._refusal

    def _is_ours(self, details: grpc.HandlerCallDetails) -> bool:
        given = [value for key, value in details.invocation_metadata or () if key == CLUSTER_TOKEN]
        if len(given) != 1 or not isinstance(given[0], str):
            return False
        # It takes as long for a token that begins rightly as for any other of its length.
        return hmac.compare_digest(given[0].encode(), self._token)

    async def _refuse(self, _: object, context: "grpc.aio.ServicerContext[Any, Any]") -> None:
        self._strangers.note(context.peer())
        await abort_with(
            context,
            PeerUnknownError(
                "this service is for the processes of its cluster alone, and the call has not brought their token; "
                f"give all of them the same {TOKEN_SETTING}"
            ),
        )


class _SignedChannel(grpc.aio.Channel):
    """A channel whose calls all bring the token. Not by interceptors: those would stand between us and each message of a stream."""

    def __init__(self, channel: grpc.aio.Channel, token: str) -> None:
        self._channel = channel
        self._metadata = ((CLUSTER_TOKEN, token),)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def unary_unary(self, *args: Any, **options: Any) -> "grpc.aio.UnaryUnaryMultiCallable[Any, Any]":
        """See grpc.aio.Channel."""
        call = partial(self._channel.unary_unary(*args, **options), metadata=self._metadata)
        return cast("grpc.aio.UnaryUnaryMultiCallable[Any, Any]", call)

    def unary_stream(self, *args: Any, **options: Any) -> "grpc.aio.UnaryStreamMultiCallable[Any, Any]":
        """See grpc.aio.Channel."""
        call = partial(self._channel.unary_stream(*args, **options), metadata=self._metadata)
        return cast("grpc.aio.UnaryStreamMultiCallable[Any, Any]", call)

    def stream_unary(self, *args: Any, **options: Any) -> "grpc.aio.StreamUnaryMultiCallable[Any, Any]":
        """See grpc.aio.Channel."""
        call = partial(self._channel.stream_unary(*args, **options), metadata=self._metadata)
        return cast("grpc.aio.StreamUnaryMultiCallable[Any, Any]", call)

    def stream_stream(self, *args: Any, **options: Any) -> "grpc.aio.StreamStreamMultiCallable[Any, Any]":
        """See grpc.aio.Channel."""
        call = partial(self._channel.stream_stream(*args, **options), metadata=self._metadata)
        return cast("grpc.aio.StreamStreamMultiCallable[Any, Any]", call)

    async def close(self, grace: float | None = None) -> None:
        """See grpc.aio.Channel."""
        await self._channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:  # noqa: FBT001, FBT002 - the base's signature
        """See grpc.aio.Channel."""
        return self._channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """See grpc.aio.Channel."""
        await self._channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        """See grpc.aio.Channel."""
        await self._channel.channel_ready()
