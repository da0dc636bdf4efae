"""The examples in Go, C++, Ruby and Java, built from Debian's packages and run against a cluster with tenants."""

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from paceline.client import Message, PacelineClient
from paceline.client_error import PacelineRpcError
from router.tenants import new_key
from tests.cluster.support import PATIENCE_S, Cluster, running_cluster
from tests.examples.clients import LANGUAGES, Example, build

# A build takes a minute or more.
pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.slow, pytest.mark.timeout(900)]

QUESTION = "What is the capital of France? Größe, 你好, 🙂"
CHAT: list[Message] = [{"role": "user", "content": QUESTION}]
# What the examples ask for.
MAX_TOKENS = 100
ACME, ACME_HASH = new_key()
SPENT, SPENT_HASH = new_key()
TENANTS = f"""
[tenants.acme]
key_hashes = ["{ACME_HASH}"]

[tenants.spent]
key_hashes = ["{SPENT_HASH}"]
tokens_per_minute = 1
burst_tokens = 300
"""


@dataclass(frozen=True, slots=True)
class Served:
    """A cluster, the answer to the question, and how a tenant hears of it whose tokens are spent."""

    cluster: Cluster
    answer: str
    refusal: PacelineRpcError

    def ended(self) -> list[str]:
        """How requests have ended so far."""
        lines = (self.cluster.local.log_dir / "router.log").read_text(encoding="utf-8").splitlines()
        events: list[dict[str, Any]] = [json.loads(line) for line in lines if '"request_done"' in line]
        return [event["ended"] for event in events]


@pytest.fixture(scope="module", params=LANGUAGES, ids=lambda language: language.name)
def example(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Example:
    """Each language's, built."""
    return build(request.param, tmp_path_factory.mktemp(request.param.name))


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def served(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer_dir: Path) -> AsyncIterator[Served]:
    """Two tenants, one of whom has no tokens left for an hour; an answer takes seconds, so that it can be cut off."""
    directory = tmp_path_factory.mktemp("clients")
    tenants = directory / "tenants.toml"
    tenants.write_text(TENANTS)
    # What a busy machine does not use up.
    sections: dict[str, dict[str, Any]] = {
        "router": {"limiter_budget_s": 20.0},
        "decode": {"fake_step_ms": 50},
    }
    async with (
        running_cluster(
            directory, tiny_tokenizer_dir, sections=sections, runner="fake", tenants=str(tenants)
        ) as cluster,
        PacelineClient(cluster.address, api_key=ACME) as acme,
        PacelineClient(cluster.address, api_key=SPENT) as spent,
    ):
        answer = await acme.generate_text(CHAT, max_tokens=MAX_TOKENS, temperature=0)
        assert answer.usage.output_tokens == MAX_TOKENS
        yield Served(cluster, answer.text, await _spend(spent))


async def _spend(client: PacelineClient) -> PacelineRpcError:
    """Asks until it is refused."""
    try:
        while True:
            await client.generate_text(CHAT, max_tokens=MAX_TOKENS, temperature=0)
    except PacelineRpcError as refusal:
        return refusal


async def test_it_streams_what_the_python_client_gets(example: Example, served: Served) -> None:
    """The answer goes to stdout, and a line about it to stderr."""
    status, out, err = await example.run(
        "--address", served.cluster.address, QUESTION, env={"PACELINE_API_KEY": ACME}
    )
    assert (status, out) == (0, served.answer), err
    assert err.startswith(f"\nFINISH_REASON_LENGTH: {MAX_TOKENS} tokens, ")
    assert err.endswith(" -> decode-0\n")


async def test_ctrl_c_ends_the_request_on_the_server(example: Example, served: Served) -> None:
    """In the middle of an answer that has been shown as far as it came: the router hears of it, and the workers keep nothing."""
    num_cancelled = served.ended().count("cancelled")
    process = await example.start(
        "--address", served.cluster.address, QUESTION, env={"PACELINE_API_KEY": ACME}
    )
    assert process.stdout is not None
    begun = await process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    out, err = await process.communicate()
    assert (process.returncode, err.decode()) == (130, "\ncancelled\n")
    assert served.answer.encode().startswith(begun + out)
    await served.cluster.until_idle()
    async with asyncio.timeout(PATIENCE_S):
        while served.ended().count("cancelled") == num_cancelled:  # noqa: ASYNC110 - there is no event: it is another process
            await asyncio.sleep(0.01)


async def test_it_shows_why_a_request_is_refused_and_when_to_come_again(
    example: Example, served: Served
) -> None:
    """Message, reason and facts of ErrorInfo, and the seconds of RetryInfo, are on stderr, and the exit status is 1."""
    status, out, err = await example.run(
        "--address", served.cluster.address, QUESTION, env={"PACELINE_API_KEY": SPENT}
    )
    assert (status, out) == (1, "")
    said = err.splitlines()
    assert said[0].startswith("error: the tenant's rate of 1 tokens a minute is used up; try again in ")
    assert {"  reason: RATE_LIMITED", "  limit: tokens", "  per_minute: 1"} <= set(said)
    retry_after_s = float(said[-1].removeprefix("  retry after: ").removesuffix(" s"))
    assert served.refusal.retry_after_s is not None
    # The tenant asked before, and the time is shown in tenths.
    assert 60 < retry_after_s < served.refusal.retry_after_s + 0.1


async def test_without_a_key_it_is_refused(example: Example, served: Served) -> None:
    """The environment's key is what lets the others in; a refusal that no waiting mends names no time."""
    status, out, err = await example.run(
        "--address", served.cluster.address, QUESTION, env={"PACELINE_API_KEY": ""}
    )
    assert (status, out) == (1, "")
    assert "  reason: TENANT_UNKNOWN\n" in err
    assert "retry after" not in err


async def test_a_call_without_a_prompt_says_how_it_is_called(example: Example) -> None:
    """Exit 2 and one line, as of any command line."""
    status, out, err = await example.run(env={})
    assert (status, out) == (2, "")
    assert err.startswith("usage: generate")
