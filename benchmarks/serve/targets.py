"""The servers that load is put on: ours by its gRPC API, others by the completions API that OpenAI's clients speak."""

import json
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Protocol

import httpx2

from paceline.client import GenerateOptions, PacelineClient
from paceline.client_error import PacelineRpcError
from paceline.core.errors import ConfigError

# What the figures of our own server are called by.
OURS = "paceline"
# A server that is silent for so long has failed.
TIMEOUT_S = 600.0
_DONE = "data: [DONE]"
# Token ids that every model has.
_FIRST_PROMPT = (3, 1, 4, 1, 5, 9, 2, 6)


class RefusedError(Exception):
    """A server did not take a request, or did not bring it to an end; its message is the server's."""


class Target(Protocol):
    """A server that continues tokens."""

    @property
    def name(self) -> str:
        """What its figures are called by."""
        ...

    def answer(
        self, prompt_ids: Sequence[int], num_output_tokens: int
    ) -> AsyncGenerator[tuple[int, ...], None]:
        """Greedy tokens, exactly so many, in parts as they come; raises RefusedError."""
        ...


class PacelineTarget:
    """Our own server, through a client that the caller closes."""

    def __init__(self, client: PacelineClient, name: str = OURS) -> None:
        self.name = name
        self._client = client

    async def answer(
        self, prompt_ids: Sequence[int], num_output_tokens: int
    ) -> AsyncGenerator[tuple[int, ...], None]:
        """See Target.answer."""
        options = GenerateOptions(
            max_tokens=num_output_tokens, ignore_eos=True, temperature=0.0, timeout_s=TIMEOUT_S
        )
        try:
            async for event in self._client.generate(prompt_ids, **options):
                if event.delta.token_ids:
                    yield tuple(event.delta.token_ids)
        except PacelineRpcError as error:
            raise RefusedError(str(error)) from error


class CompletionsTarget:
    """A server at `url`, such as http://127.0.0.1:8000/v1, that answers POST /completions with server-sent events.

    vLLM and llama.cpp do. Prompts are token ids. Of a part that does not say its tokens' ids their number is taken, if it says that: llama.cpp
    keeps the text of a token back until a character is whole. Else a part counts as one token.
    """

    def __init__(self, http: httpx2.AsyncClient, name: str, url: str, model: str) -> None:
        self.name = name
        self._http = http
        self._url = f"{url}/completions"
        self._model = model

    async def answer(
        self, prompt_ids: Sequence[int], num_output_tokens: int
    ) -> AsyncGenerator[tuple[int, ...], None]:
        """See Target.answer."""
        request = {
            "model": self._model,
            "prompt": list(prompt_ids),
            "max_tokens": num_output_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
            "timings_per_token": True,
        }
        num_known = 0
        try:
            async with self._http.stream("POST", self._url, json=request) as response:
                if response.status_code != httpx2.codes.OK:
                    said = (await response.aread()).decode(errors="replace")
                    raise RefusedError(f"{self._url} answers {response.status_code}: {said[:200]}")
                async for line in response.aiter_lines():
                    if not line.startswith("data: ") or line == _DONE:
                        continue
                    if token_ids := self._tokens_of(line, num_known):
                        num_known += len(token_ids)
                        yield token_ids
        except httpx2.HTTPError as error:
            raise RefusedError(f"{self._url}: {str(error) or type(error).__name__}") from error

    def _tokens_of(self, line: str, num_known: int) -> tuple[int, ...]:
        """The tokens of one event after so many; -1 where it does not say which token that is."""
        try:
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise RefusedError(f"{self._url}: {event['error']}"[:300])
            if not (choices := event.get("choices")):
                return ()
            if (token_ids := choices[0].get("token_ids")) is not None:
                return tuple(token_ids)
            if (num_tokens := event.get("timings", {}).get("predicted_n")) is not None:
                return (-1,) * (int(num_tokens) - num_known)
            return (-1,) if choices[0].get("text") else ()
        except (ValueError, AttributeError, KeyError, IndexError, TypeError) as error:
            raise RefusedError(f"{self._url} sends what is no completion: {line[:200]}") from error


@asynccontextmanager
async def http_client() -> AsyncIterator[httpx2.AsyncClient]:
    """As many connections as there are requests, and patience.

    None is used twice: a server may close one that is idle at the moment in which the next request takes it.
    """
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx2.AsyncClient(timeout=TIMEOUT_S, limits=limits, trust_env=False) as http:
        yield http


async def completions_target(http: httpx2.AsyncClient, name: str, url: str) -> CompletionsTarget:
    """The server at `url`; raises ConfigError when it does not say what it serves."""
    try:
        response = await http.get(f"{url}/models", timeout=10.0)
        model: str = response.json()["data"][0]["id"]
    except (httpx2.HTTPError, ValueError, KeyError, IndexError, TypeError) as error:
        raise ConfigError(
            f"--against {url}: {url}/models does not say which model is served ({error})"
        ) from error
    return CompletionsTarget(http, name, url, model)


async def require_answer(target: Target, place: str) -> None:
    """Raises ConfigError when there is none, before minutes pass in asking for others."""
    try:
        async with aclosing(target.answer(_FIRST_PROMPT, 1)) as parts:
            num_tokens = sum([len(part) async for part in parts])
    except RefusedError as error:
        raise ConfigError(f"the server at {place} does not answer: {error}") from error
    if num_tokens != 1:
        raise ConfigError(f"the server at {place} answers with {num_tokens} tokens where 1 is asked for")
