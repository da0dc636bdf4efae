"""What clients say stays between them and the models: no log line, metric, entry of the table or error of others has it."""

import asyncio
import shutil
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
import redis.asyncio

from paceline.client import GenerateOptions, Message, PacelineClient
from paceline.client_error import PacelineRpcError
from paceline.v1 import generation_pb2, inference_pb2
from router.tenants import new_key
from tests.cluster.support import Cluster, raw_generate, running_cluster

pytestmark = pytest.mark.asyncio(loop_scope="session")

CANARY = "xylophone-quagmire-7319"
# Nobody counts like this: as digits they are found wherever they are written.
CANARY_IDS = (411, 77, 293, 118, 402, 55, 307, 211)
KEY, KEY_HASH = new_key()
DEBUG = {"log_level": "debug"}
Ask = Callable[[Cluster], Coroutine[Any, Any, object]]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def cluster(
    tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer_dir: Path
) -> AsyncIterator[Cluster]:
    """One that logs everything, and tells clients apart by the key of their only tenant."""
    tmp_dir = tmp_path_factory.mktemp("secrets")
    tenants = tmp_dir / "tenants.toml"
    tenants.write_text(f'[tenants.acme]\nkey_hashes = ["{KEY_HASH}"]\n')
    async with running_cluster(
        tmp_dir,
        tiny_tokenizer_dir,
        sections=dict.fromkeys(("router", "prefill", "decode"), DEBUG),
        runner="fake",
        disaggregate="always",
        tenants=str(tenants),
    ) as cluster:
        yield cluster


def page_at(address: str) -> str:
    """The metrics of one process."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=20) as answer:
        return str(answer.read().decode())


async def everything_said(cluster: Cluster) -> str:
    """All logs, all metrics, and what Redis holds."""
    pages = []
    for address in cluster.local.metrics_addresses.values():
        # One that was killed says nothing any more.
        with suppress(urllib.error.URLError):
            pages.append(await asyncio.to_thread(page_at, address))
    async with redis.asyncio.from_url(cluster.local.redis_url) as table:
        async for key in table.scan_iter():
            pages += [repr(key), repr(await table.dump(key))]
    return "\n".join([cluster.logs(), *pages])


def is_in(text: str) -> bool:
    """Whether something of the canary is there, as it is or in another form."""
    digits = [", ".join(map(str, CANARY_IDS[:4])), " ".join(map(str, CANARY_IDS[:4]))]
    forms = [CANARY, CANARY.upper(), CANARY.encode().hex(), CANARY[:9], KEY, *digits]
    return any(form in text for form in forms)


async def ask(cluster: Cluster, prompt: Any = CANARY, **options: Any) -> str:
    """One request; gives what its client hears of an error, which is nobody else's business."""
    given: GenerateOptions = {"max_tokens": 20, "temperature": 0, **options}  # type: ignore[typeddict-item] # as given
    async with PacelineClient(cluster.address, api_key=KEY) as client:
        try:
            await client.generate_text(prompt, **given)
        except PacelineRpcError as error:
            return str(error)
    return ""


async def send(cluster: Cluster, raw: bytes, *metadata: tuple[str, str]) -> None:
    """Bytes that may be anything, with metadata that may be anything."""
    async with grpc.aio.insecure_channel(cluster.address) as channel:
        call = raw_generate(channel)(
            raw, timeout=30, metadata=(("authorization", f"Bearer {KEY}"), *metadata)
        )
        with suppress(grpc.aio.AioRpcError):
            async for _ in call:
                pass


async def leave(cluster: Cluster) -> None:
    """Cancels in the middle of an answer."""
    async with PacelineClient(cluster.address, api_key=KEY) as client:
        async for event in client.generate(CANARY, max_tokens=1000, ignore_eos=True):
            if event.HasField("delta"):
                break


async def as_stranger(cluster: Cluster) -> None:
    """With a key that nobody has."""
    async with PacelineClient(cluster.address, api_key=CANARY) as client:
        with suppress(PacelineRpcError):
            await client.generate_text(CANARY)


def chat(*contents: str) -> list[dict[str, str]]:
    """A conversation."""
    roles = ("system", "user", "assistant")
    return [{"role": roles[index % 3], "content": content} for index, content in enumerate(contents)]


def raw(**fields: Any) -> bytes:
    """A request's bytes."""
    return inference_pb2.GenerateRequest(**fields).SerializeToString()


WAYS: dict[str, Ask] = {
    "text": ask,
    "chat": lambda cluster: ask(cluster, chat(f"Be a {CANARY}.", CANARY, CANARY, CANARY)),
    "token ids": lambda cluster: ask(cluster, CANARY_IDS * 10),
    "stop": lambda cluster: ask(cluster, stop=[CANARY, f"{CANARY}\n"], include_stop=True),
    "log probabilities": lambda cluster: ask(cluster, num_top_logprobs=2, prompt_logprobs=True),
    "candidates": lambda cluster: ask(cluster, temperature=1.0, n=1, seed=7319),
    "too long": lambda cluster: ask(cluster, f"{CANARY} " * 5000),
    "too many tokens": lambda cluster: ask(cluster, CANARY_IDS * 1000),
    "unknown token": lambda cluster: ask(cluster, (*CANARY_IDS, 999_999)),
    "max_tokens": lambda cluster: ask(cluster, max_tokens=100_000),
    "long stop": lambda cluster: ask(cluster, stop=[CANARY * 50]),
    "prefix": lambda cluster: ask(cluster, public_prefix=CANARY),
    "label": lambda cluster: ask(cluster, client_request_id=CANARY * 50),
    "deadline": lambda cluster: ask(cluster, max_tokens=1000, ignore_eos=True, timeout_s=0.06),
    "role": lambda cluster: ask(cluster, [{"role": CANARY, "content": CANARY}]),
    "broken text": lambda cluster: send(cluster, b"\x12\x19" + CANARY.encode() + b"\xff\xfe"),
    "cut off": lambda cluster: send(cluster, raw(text=CANARY * 3)[:-5]),
    "unknown field": lambda cluster: send(cluster, raw(text=CANARY) + b"\xfa\x07\x17" + CANARY.encode()),
    "session": lambda cluster: send(cluster, raw(text=CANARY), ("paceline-session-id", CANARY)),
    "long session": lambda cluster: send(cluster, raw(text=CANARY), ("paceline-session-id", CANARY * 50)),
    "metadata": lambda cluster: send(cluster, raw(text=CANARY), ("x-note", CANARY), ("user-agent", CANARY)),
    "bias": lambda cluster: send(
        cluster,
        raw(
            text=CANARY,
            sampling=generation_pb2.SamplingParams(logit_bias=dict.fromkeys(CANARY_IDS, 200.0)),
        ),
    ),
    "leave": leave,
    "stranger": as_stranger,
}


@pytest.mark.parametrize("way", WAYS)
async def test_nobody_else_hears_of_it(cluster: Cluster, way: str) -> None:
    """Served, refused or broken off; with all that is logged, counted and kept."""
    await WAYS[way](cluster)
    assert not is_in(await everything_said(cluster))


async def test_nobody_else_hears_the_answer(cluster: Cluster) -> None:
    """Of the text that came no piece of twelve characters is anywhere."""
    async with PacelineClient(cluster.address, api_key=KEY) as client:
        answer = await client.generate_text(CANARY, max_tokens=60, temperature=0, ignore_eos=True)
    assert len(answer.text) > 30
    assert answer.text[:12] not in await everything_said(cluster)


async def test_something_was_said_at_all(cluster: Cluster) -> None:
    """The twin of the above: what was asked is in the logs by its facts, and a label is there by its words."""
    await ask(cluster)
    await ask(cluster, client_request_id="label-4711")
    await ask(cluster, max_tokens=100_000)
    said = await everything_said(cluster)
    assert "label-4711" in said
    for word in ('"request_done"', '"request_refused"', '"BAD_STOP"', "paceline_requests_total", "paceline:"):
        assert word in said
    assert is_in(f"... {CANARY} ...")
    assert is_in(f"[{', '.join(map(str, CANARY_IDS))}]")


async def test_an_error_does_not_quote_the_prompt(cluster: Cluster) -> None:
    """Not even to its own client, whose log it may end up in."""
    for way in (
        ask(cluster, f"{CANARY} " * 5000),
        ask(cluster, max_tokens=100_000),
        ask(cluster, stop=[CANARY * 50]),
    ):
        said = await way
        assert said
        assert CANARY not in said


@pytest.mark.thorough
async def test_a_lost_worker_takes_it_along(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    """The attempt that failed, the obituary and the next attempt's log say nothing of it."""
    slow = {**DEBUG, "fake_step_ms": 20}
    async with running_cluster(
        tmp_path,
        tiny_tokenizer_dir,
        sections={"router": DEBUG, "prefill": DEBUG, "decode": slow},
        runner="fake",
        topology="1P2D",
        disaggregate="always",
    ) as cluster:
        answering = asyncio.create_task(
            cluster.client.generate_text(CANARY, max_tokens=60, temperature=0, ignore_eos=True)
        )
        busy = [
            asyncio.create_task(cluster.until(f"decode-{number}", lambda load: load.num_running > 0))
            for number in (0, 1)
        ]
        ended, _ = await asyncio.wait(busy, return_when=asyncio.FIRST_COMPLETED)
        cluster.local.kill(f"decode-{busy.index(ended.pop())}")
        assert len((await answering).token_ids) == 60
        for task in busy:
            task.cancel()
        await asyncio.gather(*busy, return_exceptions=True)
        said = await everything_said(cluster)
        assert '"attempt_failed"' in said
        assert not is_in(said)


@pytest.mark.thorough
async def test_a_library_that_quotes_it_is_not_quoted(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    """A bug whose exception has the prompt in its words is logged by its kind and its lines of code."""
    model = tmp_path / "model"
    shutil.copytree(tiny_tokenizer_dir, model)
    # Whatever stands in braces is looked for, and not found.
    (model / "chat_template.jinja").write_text("{{ messages[0]['content'].format() }}")
    async with running_cluster(
        tmp_path, model, sections={"router": DEBUG}, runner="fake", topology="0P1D"
    ) as cluster:
        asked: list[Message] = [{"role": "user", "content": f"{{{CANARY}}}"}]
        for call in (cluster.client.generate_text(asked), cluster.client.tokenize(asked)):
            with pytest.raises(PacelineRpcError) as caught:
                await call
            assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.INTERNAL, "INVARIANT")
            assert CANARY not in str(caught.value)
        logs = cluster.logs()
        assert logs.count('"request_failed"') == 2
        assert "KeyError" in logs
        assert "tokenizer.py" in logs
        assert not is_in(logs)
