"""The Python client against a small service."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import any_pb2
from google.rpc import status_pb2

from paceline.client import PacelineClient, Prompt
from paceline.client_channel import Tls
from paceline.client_error import PacelineRpcError, from_rpc_error
from paceline.v1 import inference_pb2
from tests.certificates import Authority
from tests.fake_inference import (
    ENDLESS,
    FLOOD,
    FULL,
    PROMPT_LOGPROBS,
    TOO_LONG,
    FakeInference,
    serve_fake_inference,
)
from tests.left_generators import left_generators


@pytest.fixture
async def client(fake_inference: FakeInference) -> AsyncIterator[PacelineClient]:
    """A client of the fake service."""
    async with PacelineClient(fake_inference.address) as made:
        yield made


async def test_generate_yields_the_events_as_they_come(client: PacelineClient) -> None:
    """Every event of the server reaches the caller, in order."""
    events = [event async for event in client.generate("one two")]
    kinds = [event.WhichOneof("event") for event in events]
    assert kinds == ["accepted", "delta", "prefill_done", "delta", "finish"]


async def test_generate_text_collects_the_answer(client: PacelineClient) -> None:
    """A completion holds the whole text, its tokens, why it ended, and what it cost."""
    answer = await client.generate_text([{"role": "user", "content": "one two three"}])
    assert (answer.text, answer.token_ids) == ("one two three", (0, 1, 2))
    assert (answer.finish_reason, answer.matched_stop) == ("stop", "###")
    assert (answer.usage.output_tokens, answer.cached_tokens) == (3, 2)
    assert (answer.prefill_worker, answer.decode_worker) == ("prefill-0", "decode-0")
    assert len(answer.request_id) == 32


async def test_log_probabilities_of_the_prompt_are_there_when_asked_for(
    client: PacelineClient, fake_inference: FakeInference
) -> None:
    """They come with the answer; unless asked for, nothing is said of log probabilities at all."""
    asking = await client.generate_text("one", prompt_logprobs=True)
    silent = await client.generate_text("one", prompt_logprobs=False)
    assert asking.prompt_logprobs == tuple(PROMPT_LOGPROBS)
    assert silent.prompt_logprobs == ()
    assert [request.HasField("logprobs") for request in fake_inference.requests] == [True, False]


@pytest.mark.parametrize(
    ("prompt", "kind"),
    [
        ("text", "text"),
        ([1, 2], "token_ids"),
        ((1, 2), "token_ids"),
        ([{"role": "user", "content": "hi"}], "chat"),
    ],
)
async def test_each_kind_of_prompt_goes_into_its_field(
    client: PacelineClient, fake_inference: FakeInference, prompt: Prompt, kind: str
) -> None:
    """Text, token ids and messages are told apart by their type."""
    await client.generate_text(prompt)
    assert fake_inference.requests[0].WhichOneof("prompt") == kind


async def test_options_reach_the_server_and_absent_ones_stay_absent(
    client: PacelineClient, fake_inference: FakeInference
) -> None:
    """What the caller sets is sent, zeros included; what it does not set is left to the server."""
    await client.generate_text("hi", temperature=0, seed=0, stop=["###"], max_tokens=5, top_k=None)
    await client.generate_text("hi", top_p=0.5, stop_token_ids=[7], ignore_eos=True, include_stop=True)
    first, second = fake_inference.requests
    assert {field.name for field, _ in first.sampling.ListFields()} == {"temperature", "seed"}
    assert (first.stopping.max_tokens, list(first.stopping.stop)) == (5, ["###"])
    assert {field.name for field, _ in second.sampling.ListFields()} == {"top_p"}
    assert list(second.stopping.stop_token_ids) == [7]
    assert second.stopping.ignore_eos
    assert second.stopping.include_stop


async def test_a_priority_is_sent_by_its_name(client: PacelineClient, fake_inference: FakeInference) -> None:
    """Each name is a class of the contract, and absent leaves it to the server; another name is an error."""
    for priority in ("realtime", "standard", "batch", None):
        await client.generate_text("hi", priority=priority)
    sent = [inference_pb2.Priority.Name(request.priority) for request in fake_inference.requests]
    assert sent == ["PRIORITY_REALTIME", "PRIORITY_STANDARD", "PRIORITY_BATCH", "PRIORITY_UNSPECIFIED"]
    wrong: dict[str, Any] = {"priority": "unspecified"}
    with pytest.raises(TypeError, match="known: realtime, standard, batch"):
        client.generate("hi", **wrong)


async def test_an_unknown_option_is_refused_at_once(client: PacelineClient) -> None:
    """A misspelt option is an error, never silently left out."""
    options: dict[str, Any] = {"max_token": 5}
    with pytest.raises(TypeError, match="max_token"):
        client.generate("hi", **options)


async def test_tokenize_and_server_info(client: PacelineClient) -> None:
    """The two other methods of the service answer with plain values."""
    assert await client.tokenize("ab") == (97, 98)
    assert await client.tokenize([{"role": "user", "content": "hi"}]) == (0,)
    assert (await client.server_info()).model_id == "fake-model"


async def test_leaving_the_loop_cancels_on_the_server(
    client: PacelineClient, fake_inference: FakeInference
) -> None:
    """After a break, the server's handler is cancelled."""
    async for event in client.generate(FLOOD):
        if event.HasField("delta"):
            break
    await fake_inference.cancelled.wait()


async def test_closing_the_generator_cancels_on_the_server(
    client: PacelineClient, fake_inference: FakeInference
) -> None:
    """The same with aclosing, for a caller who keeps the generator, and while the server is silent."""
    async with aclosing(client.generate(ENDLESS)) as events:
        await anext(events)
    await fake_inference.cancelled.wait()


async def test_no_generator_is_left_by_whoever_leaves_early(client: PacelineClient) -> None:
    """Who closes the answer has closed what reads it too: nothing is left for the garbage collector to end."""
    with left_generators() as names:
        async with aclosing(client.generate(ENDLESS)) as events:
            async for event in events:
                if event.HasField("delta"):
                    break
    assert names == []


async def test_cancelling_the_task_cancels_on_the_server(
    client: PacelineClient, fake_inference: FakeInference
) -> None:
    """A cancelled task lets CancelledError pass, and the server hears of it."""
    started = asyncio.Event()

    async def consume() -> None:
        """Reads until it is cancelled."""
        async for _ in client.generate(ENDLESS):
            started.set()

    task = asyncio.create_task(consume())
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await fake_inference.cancelled.wait()


async def test_a_deadline_ends_the_call(client: PacelineClient, fake_inference: FakeInference) -> None:
    """A request that takes longer than timeout_s fails with DEADLINE_EXCEEDED, and stops on the server."""
    with pytest.raises(PacelineRpcError) as caught:
        await client.generate_text(ENDLESS, timeout_s=0.2)
    assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
    await fake_inference.cancelled.wait()


async def test_an_error_carries_the_reason_and_facts_of_the_server(client: PacelineClient) -> None:
    """ErrorInfo becomes reason and facts, without googleapis in the client."""
    with pytest.raises(PacelineRpcError) as caught:
        await client.generate_text(TOO_LONG)
    error = caught.value
    assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "PROMPT_TOO_LONG")
    assert error.facts == {"limit": "4096", "given": "5120", "unit": "tokens"}
    assert error.retry_after_s is None
    assert "shorten it" in error.message


async def test_an_error_says_when_to_try_again(client: PacelineClient) -> None:
    """RetryInfo becomes retry_after_s."""
    with pytest.raises(PacelineRpcError) as caught:
        await client.generate_text(FULL)
    assert (caught.value.reason, caught.value.retry_after_s) == ("QUEUE_FULL", 1.5)


async def test_several_servers_share_the_calls_and_one_that_is_lost_gets_none() -> None:
    """Calls go to each address in turn; when a server has gone, to those that are left."""
    async with AsyncExitStack() as first_lives, serve_fake_inference() as second:
        first = await first_lives.enter_async_context(serve_fake_inference())
        async with PacelineClient(f"{first.address},{second.address}") as client, asyncio.timeout(60):
            while not (first.requests and second.requests):
                await client.generate_text("hi")
            await first_lives.aclose()
            num_in_a_row = 0
            while num_in_a_row < 8:
                try:
                    await client.generate_text("hi")
                    num_in_a_row += 1
                except PacelineRpcError:
                    num_in_a_row = 0


@pytest.mark.parametrize("address", ["a:1,b:2", "10.0.0.1:1,[::1]:2", "unix:/x,unix:/y"])
async def test_a_list_that_cannot_be_called_is_refused(address: str) -> None:
    """Names are not listed: one name may have several addresses instead."""
    with pytest.raises(ValueError, match="dns:NAME:PORT"):
        PacelineClient(address)


async def test_a_name_is_called_at_its_addresses(fake_inference: FakeInference) -> None:
    """All that resolve; the others of them do not matter."""
    port = fake_inference.address.rpartition(":")[2]
    async with PacelineClient(f"dns:localhost:{port}") as client:
        assert (await client.generate_text("one two")).text == "one two"


async def test_no_server_is_unavailable_without_a_reason(unused_tcp_port: int) -> None:
    """Where nobody listens, every method fails with UNAVAILABLE and an empty reason."""
    async with PacelineClient(f"127.0.0.1:{unused_tcp_port}") as client:
        for call in (client.generate_text("hi"), client.tokenize("hi"), client.server_info()):
            with pytest.raises(PacelineRpcError) as caught:
                await call
            assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.UNAVAILABLE, "")


def _rpc_error(details: bytes) -> grpc.aio.AioRpcError:
    metadata = grpc.aio.Metadata(("grpc-status-details-bin", details))
    return grpc.aio.AioRpcError(grpc.StatusCode.INTERNAL, grpc.aio.Metadata(), metadata, details="broken")


@pytest.mark.parametrize("details", [b"", b"\xff\xff", b"\x1a\x05abc", b"\x1a\x02\xff\xff"])
def test_details_that_cannot_be_read_hide_nothing(details: bytes) -> None:
    """Where the details of an error are malformed, its code and message still come through."""
    error = from_rpc_error(_rpc_error(details))
    assert (error.code, error.message, error.reason) == (grpc.StatusCode.INTERNAL, "broken", "")


def test_details_of_other_kinds_are_passed_over() -> None:
    """Details that Paceline does not send, from a proxy say, do no harm."""
    other = any_pb2.Any()
    other.Pack(inference_pb2.Usage(prompt_tokens=1))
    status = status_pb2.Status(code=13, message="é", details=[other])
    assert from_rpc_error(_rpc_error(status.SerializeToString())).reason == ""


def test_the_client_needs_only_grpcio_and_protobuf() -> None:
    """Beside what grpc loads by itself, importing the client loads only protobuf and the standard library."""
    code = (
        "import sys, grpc.aio; before = set(sys.modules)\n"
        "import paceline.client; new = set(sys.modules) - before\n"
        "print(*(name for name in new if name.partition('.')[0] not in sys.stdlib_module_names))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    allowed = ("paceline", "grpc.", "google", "typing_extensions")
    assert [name for name in done.stdout.split() if not name.startswith(allowed)] == []
    assert "google.rpc" not in done.stdout


async def test_candidates_come_apart_by_their_index(
    client: PacelineClient, fake_inference: FakeInference
) -> None:
    """Events of several candidates come mixed; `generate_texts` gives each one whole, in order."""
    indexes = [event.index async for event in client.generate("a b", n=3) if event.HasField("delta")]
    completions = await client.generate_texts("a b", n=3)
    assert indexes == [0, 1, 2, 0, 1, 2, 1, 2]
    assert [completion.text for completion in completions] == ["a b", "a b 1", "a b 2"]
    assert [completion.token_ids for completion in completions] == [(0, 1), (0, 1, 2), (0, 1, 2)]
    assert len({completion.request_id for completion in completions}) == 1
    assert [request.n for request in fake_inference.requests] == [3, 3]


async def test_one_answer_cannot_be_several(client: PacelineClient, fake_inference: FakeInference) -> None:
    """`generate_text` with n above 1 is an error before anything is sent; without n there is one candidate."""
    with pytest.raises(TypeError, match="generate_texts"):
        await client.generate_text("a", n=2)
    assert fake_inference.requests == []
    assert [completion.text for completion in await client.generate_texts("a")] == ["a"]
    assert not fake_inference.requests[0].HasField("n")


async def test_a_key_goes_with_each_call(fake_inference: FakeInference) -> None:
    """As `authorization: Bearer`; a client without one says nothing of it."""
    async with (
        PacelineClient(fake_inference.address, api_key="key-1") as keyed,
        PacelineClient(fake_inference.address) as plain,
    ):
        for client in (keyed, plain):
            await client.generate_text("one")
            await client.tokenize("one")
            await client.server_info()
    assert fake_inference.keys == ["Bearer key-1"] * 3 + [None] * 3


@pytest.mark.parametrize("key", ["two words", "line\n", "clé"])
async def test_what_cannot_be_a_key_is_refused_and_not_shown(key: str) -> None:
    """Before anything is sent; a header could not carry it."""
    with pytest.raises(ValueError, match="API key") as caught:
        PacelineClient("127.0.0.1:1", api_key=key)
    assert key not in str(caught.value)


async def test_a_server_that_speaks_tls_is_called_over_tls(tmp_path: Path) -> None:
    """With its CA, and with a certificate where it wants one; its certificate has its host's name, or the one that is given."""
    authority = Authority(tmp_path)
    server, mine = authority.issue("server", "llm.example"), authority.issue("client")
    credentials = grpc.ssl_server_credentials(
        [(server.key.read_bytes(), server.cert.read_bytes())], authority.ca.read_bytes(), True
    )
    good = Tls(ca=authority.ca, cert=str(mine.cert), key=str(mine.key), server_name="llm.example")
    async with serve_fake_inference(credentials) as service:
        async with PacelineClient(service.address, tls=good) as client:
            assert (await client.generate_text("one two")).text == "one two"
        for wrong in (replace(good, server_name=None), replace(good, cert=None, key=None), Tls(), None):
            async with PacelineClient(service.address, tls=wrong) as client:
                with pytest.raises(PacelineRpcError) as caught:
                    await client.tokenize("one")
            assert caught.value.code is grpc.StatusCode.UNAVAILABLE


async def test_several_servers_have_a_name_in_common(tmp_path: Path) -> None:
    """A list of addresses is no name that a certificate could have: it is given, or the list is a name of DNS."""
    authority = Authority(tmp_path)
    server = authority.issue("server", "localhost")
    pair = [(server.key.read_bytes(), server.cert.read_bytes())]
    async with (
        serve_fake_inference(grpc.ssl_server_credentials(pair)) as one,
        serve_fake_inference(grpc.ssl_server_credentials(pair)) as two,
    ):
        both, (_, _, port) = f"{one.address},{two.address}", one.address.rpartition(":")
        for address, name in ((both, "localhost"), (f"dns:localhost:{port}", None)):
            async with PacelineClient(address, tls=Tls(ca=authority.ca, server_name=name)) as client:
                assert await client.tokenize("ab") == (97, 98)
        async with PacelineClient(both, tls=Tls(ca=authority.ca)) as client:
            with pytest.raises(PacelineRpcError, match="erification"):
                await client.tokenize("ab", timeout_s=5)


def test_half_of_a_certificate_is_refused() -> None:
    """A certificate without its key, and a key without its certificate."""
    for half in ({"cert": "c.pem"}, {"key": "k.pem"}):
        with pytest.raises(ValueError, match="go together"):
            Tls(**half)
