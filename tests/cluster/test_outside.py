"""What a user sees of a cluster: from other languages, from the command line, in its answers and in its logs."""

import asyncio
import itertools
import json
import re
import signal
import subprocess
import sys
from asyncio.subprocess import PIPE
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from paceline.client import Message
from paceline.client_error import from_rpc_error
from paceline.v1 import worker_pb2
from paceline.v1.worker_pb2_grpc import WorkerServiceStub
from tests.cluster.support import Cluster, fake_tokens
from tests.conftest import ROOT
from tests.tiny_model import EOS_ID, VOCAB_SIZE

pytestmark = pytest.mark.asyncio(loop_scope="session")

QUESTION = "What is the capital of France?"
CHAT: list[Message] = [{"role": "user", "content": QUESTION}]


async def run(*command: str | Path) -> tuple[int | None, str, str]:
    """Status, stdout and stderr of a command."""
    process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=PIPE)
    out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode()


async def chat_answer(cluster: Cluster, max_tokens: int) -> tuple[str, tuple[int, ...]]:
    """Text and tokens of the greedy answer to the question, as the Python client gets them."""
    answer = await cluster.client.generate_text(CHAT, max_tokens=max_tokens, temperature=0)
    prompt = await cluster.client.tokenize(CHAT)
    assert answer.token_ids == fake_tokens(prompt, max_tokens, VOCAB_SIZE, EOS_ID)
    return answer.text, answer.token_ids


async def test_node_gets_the_same_answer(idle_fake_cluster: Cluster, node_example: Path) -> None:
    """The Node example streams what the Python client gets, from the same server."""
    text, token_ids = await chat_answer(idle_fake_cluster, 100)
    status, out, err = await run(
        "node", node_example / "generate.mjs", "--address", idle_fake_cluster.address, QUESTION
    )
    assert (status, out) == (0, text), err
    assert f"{len(token_ids)} tokens" in err


async def test_grpcurl_needs_no_protos(idle_fake_cluster: Cluster) -> None:
    """By reflection alone grpcurl lists the services and calls them."""
    grpcurl = Path(sys.executable).with_name("grpcurl")
    status, out, err = await run(grpcurl, "-plaintext", idle_fake_cluster.address, "list")
    assert status == 0, err
    assert {"paceline.v1.InferenceService", "grpc.health.v1.Health"} <= set(out.split())
    request = {"token_ids": {"ids": [4, 5, 6]}, "sampling": {"temperature": 0}, "stopping": {"max_tokens": 3}}
    method = "paceline.v1.InferenceService/Generate"
    status, out, err = await run(
        grpcurl, "-plaintext", "-d", json.dumps(request), idle_fake_cluster.address, method
    )
    assert status == 0, err
    # Objects one after another, in protobuf's JSON.
    assert '"reason": "FINISH_REASON_LENGTH"' in out
    # How many of them come together is chance.
    said = [json.loads(ids) for ids in re.findall(r'"token_ids": (\[[^]]*\])', out)]
    assert tuple(itertools.chain(*said)) == fake_tokens((4, 5, 6), 3, VOCAB_SIZE, EOS_ID)


async def test_the_python_example_runs(idle_fake_cluster: Cluster) -> None:
    """The example for Python prints an answer and where it came from."""
    status, _, err = await run(
        *(sys.executable, ROOT / "examples" / "python" / "generate.py"),
        *("--address", idle_fake_cluster.address, QUESTION),
    )
    assert status == 0, err
    assert "prefill-0 -> decode-0" in err


async def test_the_command_line_answers_as_json(idle_fake_cluster: Cluster) -> None:
    """`./run generate --json` gives one object with the tokens that every other client gets."""
    text, token_ids = await chat_answer(idle_fake_cluster, 12)
    cli = (sys.executable, "-m", "paceline.cli", "generate", QUESTION, "--json", "--max-tokens", "12")
    status, out, err = await run(*cli, "--address", idle_fake_cluster.address)
    assert status == 0, err
    answer = json.loads(out)
    assert (answer["text"], tuple(answer["token_ids"])) == (text, token_ids)
    assert answer["timeline"]["decode_worker"] == "decode-0"


async def test_ctrl_c_cancels_on_the_workers(idle_fake_cluster: Cluster) -> None:
    """SIGINT to the command line in the middle of an answer ends the request on every tier."""
    cli = (
        sys.executable,
        "-m",
        "paceline.cli",
        "generate",
        "hello",
        "--raw",
        "--max-tokens",
        "2000",
        "--seed",
        "3",
    )
    process = await asyncio.create_subprocess_exec(
        *cli, "--address", idle_fake_cluster.address, stdout=PIPE, stderr=subprocess.DEVNULL
    )
    assert process.stdout is not None
    await process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    await process.communicate()
    # The answer may have ended by itself, so quick is the fake; cancelled or not, nothing may stay.
    assert process.returncode in (130, 0)
    await idle_fake_cluster.until_idle()


async def test_the_server_says_what_it_serves(idle_fake_cluster: Cluster, tiny_tokenizer_dir: Path) -> None:
    """GetServerInfo names model, limits, index mode and workers."""
    info = await idle_fake_cluster.client.server_info()
    assert info.model_id == tiny_tokenizer_dir.name
    assert (info.limits.max_model_tokens, info.limits.max_prompt_tokens) == (2048, 2047)
    assert (info.index_mode, info.limiter_mode) == ("redis", "none")
    assert {worker.worker_id for worker in info.workers} == {"prefill-0", "decode-0"}
    assert len(bytes.fromhex(info.fingerprint)) == 16


@pytest.mark.parametrize("service", ["", "liveness", "paceline.v1.InferenceService"])
async def test_health_is_served(idle_fake_cluster: Cluster, service: str) -> None:
    """The standard health service answers for the server, for liveness, and for the service by name."""
    async with grpc.aio.insecure_channel(idle_fake_cluster.address) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check  # type: ignore[attr-defined] # absent in its types
        answer = await check(health_pb2.HealthCheckRequest(service=service))
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_a_local_cluster_refuses_strangers_too(idle_fake_cluster: Cluster) -> None:
    """Whoever gets at a worker's socket and does not know the token learns nothing; the probe of its health is answered."""
    for address in idle_fake_cluster.local.worker_addresses.values():
        async with grpc.aio.insecure_channel(address) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await WorkerServiceStub(channel).GetInfo(worker_pb2.GetInfoRequest(), timeout=20)
            assert from_rpc_error(caught.value).reason == "PEER_UNKNOWN"
            check = health_pb2_grpc.HealthStub(channel).Check  # type: ignore[attr-defined] # absent in its types
            answer = await check(health_pb2.HealthCheckRequest(service=""))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.parametrize("include_stop", [False, True])
async def test_a_stop_string_ends_the_text(idle_fake_cluster: Cluster, include_stop: bool) -> None:
    """Nothing after the stop string is shown or counted, and the finish says which one matched."""
    prompt = (30, 31, 32)
    whole = await idle_fake_cluster.client.generate_text(
        prompt, max_tokens=40, temperature=0, ignore_eos=True
    )
    stop = whole.text[10:13]
    answer = await idle_fake_cluster.client.generate_text(
        prompt,
        max_tokens=40,
        temperature=0,
        ignore_eos=True,
        stop=["never this", stop],
        include_stop=include_stop,
    )
    cut = whole.text.index(stop)
    assert answer.text == whole.text[: cut + len(stop) if include_stop else cut]
    assert (answer.finish_reason, answer.matched_stop) == ("stop", stop)
    assert answer.token_ids == whole.token_ids[: answer.usage.output_tokens]
    assert answer.usage.output_tokens < 40
