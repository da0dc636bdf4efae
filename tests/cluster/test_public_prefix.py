"""Salts and public prefixes through real processes: what a tenant keeps for itself, and what everybody shares."""

import json
from pathlib import Path

import grpc
import pytest

from paceline.client import GenerateOptions
from paceline.client_error import PacelineRpcError
from tests.cluster.support import Cluster, fake_tokens, running_cluster
from tests.tiny_model import VOCAB_SIZE

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.thorough]

# Two and a half blocks of 16 are public; the worker has pinned them for everybody.
PUBLIC = tuple((7 * i + 3) % VOCAB_SIZE for i in range(40))
PROMPT = PUBLIC + tuple((5 * i + 2) % VOCAB_SIZE for i in range(60))


async def test_what_is_public_is_shared_and_the_rest_is_salted(
    tmp_path: Path, tiny_tokenizer_dir: Path
) -> None:
    """With a salt a request hits what was pinned for everybody only where it names it; its own blocks it hits always."""
    salt, public, pinned = tmp_path / "salt", tmp_path / "public.jsonl", tmp_path / "pinned.jsonl"
    salt.write_text("0123456789abcdef")
    public.write_text(json.dumps({"name": "greeting", "token_ids": PUBLIC}))
    pinned.write_text(json.dumps({"token_ids": PUBLIC[:32]}))
    settings = {"cache_salt_file": str(salt), "public_prefixes": str(public)}
    async with running_cluster(
        tmp_path,
        tiny_tokenizer_dir,
        sections={"router": settings},
        runner="fake",
        pinned_prefixes=str(pinned),
    ) as cluster:
        assert await cached(cluster, PROMPT) == 0
        assert await cached(cluster, PROMPT) == 96
        assert await cached(cluster, PROMPT, public_prefix="greeting") == 32
        assert await cached(cluster, PROMPT, public_prefix="greeting") == 96
        # It names the prefix, and does not begin with it.
        assert await cached(cluster, (1, *PROMPT), public_prefix="greeting") == 0
        with pytest.raises(PacelineRpcError, match=r"cache\.public_prefix") as caught:
            await cached(cluster, PROMPT, public_prefix="other")
        assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "BAD_PROMPT")


async def cached(cluster: Cluster, prompt: tuple[int, ...], public_prefix: str | None = None) -> int:
    """How many tokens of the prompt were cached; its answer is the oracle's."""
    asked = GenerateOptions(max_tokens=4, temperature=0, ignore_eos=True, public_prefix=public_prefix)
    answer = await cluster.client.generate_text(prompt, **asked)
    assert answer.token_ids == fake_tokens(prompt, 4, VOCAB_SIZE, None)
    return answer.cached_tokens
