"""A client's bytes become a valid Request or are refused, and nothing in them is silently ignored."""

import math
from collections.abc import Callable

import pytest
from google.protobuf.message import Message

from paceline.core.errors import (
    BadFieldError,
    BadPromptError,
    BadSamplingError,
    BadStopError,
    InvalidRequestError,
    PacelineError,
    PromptTooLongError,
)
from paceline.core.request import ChatMessage, Priority, Request
from paceline.runtime.wire import MAX_UINT32, check_prompt_logprobs, parse_generate, parse_tokenize
from paceline.v1 import generation_pb2, inference_pb2
from tests.factories import make_limits

LIMITS = make_limits(max_model_tokens=100, max_prompt_bytes=1000)
Generate = inference_pb2.GenerateRequest
Sampling = generation_pb2.SamplingParams
Stopping = generation_pb2.StopConditions
User = inference_pb2.ChatMessage(role="user", content="hello")
Long = inference_pb2.ChatMessage(role="user", content="x" * 600)


def _parse(message: inference_pb2.GenerateRequest) -> Request:
    return parse_generate(message.SerializeToString(), LIMITS)


def _sampling(**fields: float) -> inference_pb2.GenerateRequest:
    return Generate(text="hello", sampling=Sampling(**fields))  # type: ignore[arg-type] # each has its field's type


def _stopping(**fields: object) -> inference_pb2.GenerateRequest:
    return Generate(text="hello", stopping=Stopping(**fields))  # type: ignore[arg-type] # each has its field's type


def _logprobs(**fields: int) -> inference_pb2.GenerateRequest:
    options = generation_pb2.LogprobOptions(**fields)  # type: ignore[arg-type] # each has its field's type
    return Generate(text="hello", logprobs=options)


def _bias(**bias: float) -> inference_pb2.GenerateRequest:
    """Keys are token ids with a letter before them."""
    return Generate(text="hello", sampling=Sampling(logit_bias={int(key[1:]): bias[key] for key in bias}))


def _chat(*messages: inference_pb2.ChatMessage) -> inference_pb2.GenerateRequest:
    return Generate(chat=inference_pb2.Chat(messages=messages))


def _ids(*ids: int) -> inference_pb2.GenerateRequest:
    return Generate(token_ids=generation_pb2.TokenIds(ids=ids))


# -- what is taken


def test_a_bare_prompt_gets_the_defaults_of_the_contract() -> None:
    """Temperature 1, all tokens, no stop, the server's max_tokens, the cache in use."""
    request = _parse(Generate(text="hello"))
    assert request.prompt == "hello"
    assert (request.sampling.temperature, request.sampling.top_p, request.sampling.top_k) == (1.0, 1.0, 0)
    assert request.stopping.max_tokens is None
    assert (request.stopping.stop, request.stopping.stop_token_ids) == ((), ())
    assert (request.stopping.ignore_eos, request.stopping.include_stop) == (False, False)
    assert (request.bypass_cache, request.n) == (False, 1)


def test_everything_that_is_built_is_taken_over() -> None:
    """Each honoured field arrives with its value."""
    message = Generate(
        client_request_id="mine",
        token_ids=generation_pb2.TokenIds(ids=[1, 2, 3]),
        sampling=Sampling(temperature=0.5, top_p=0.25, top_k=7, seed=11, logit_bias={9: 1.0, 4: -1.0}),
        stopping=Stopping(
            max_tokens=9, stop=["a", "b"], stop_token_ids=[4, 5], ignore_eos=True, include_stop=True
        ),
        n=3,
        priority=inference_pb2.PRIORITY_STANDARD,
        cache=inference_pb2.CacheOptions(bypass=True),
    )
    request = _parse(message)
    assert request.prompt == (1, 2, 3)
    assert (request.sampling.temperature, request.sampling.top_p) == (0.5, 0.25)
    assert (request.sampling.top_k, request.sampling.seed) == (7, 11)
    assert request.sampling.logit_bias == ((4, -1.0), (9, 1.0))
    assert request.stopping.max_tokens == 9
    assert (request.stopping.stop, request.stopping.stop_token_ids) == (("a", "b"), (4, 5))
    assert (request.stopping.ignore_eos, request.stopping.include_stop) == (True, True)
    assert (request.client_request_id, request.bypass_cache, request.n) == ("mine", True, 3)


def test_a_chat_keeps_roles_and_contents_in_order() -> None:
    """Every known role; an empty content is a message too."""
    roles = ["system", "user", "assistant"]
    messages = [inference_pb2.ChatMessage(role=role, content=f"{role}!") for role in roles]
    request = _parse(_chat(*messages, inference_pb2.ChatMessage(role="user")))
    expected = [ChatMessage(role, f"{role}!") for role in roles]
    assert request.prompt == (*expected, ChatMessage("user", ""))


def test_a_missing_seed_is_minted_and_a_given_one_kept() -> None:
    """Two requests without a seed differ; a seed of 0 is a seed."""
    minted = {_parse(Generate(text="hello")).sampling.seed for _ in range(5)}
    assert len(minted) == 5
    assert all(0 <= seed < 2**64 for seed in minted)
    assert _parse(_sampling(seed=0)).sampling.seed == 0
    assert _parse(_sampling(seed=2**64 - 1)).sampling.seed == 2**64 - 1


@pytest.mark.parametrize(
    "message",
    [
        _sampling(temperature=0),
        _sampling(temperature=100),
        _sampling(top_p=1),
        _sampling(top_p=1e-6),
        _sampling(top_k=0),
        _sampling(min_p=0, repetition_penalty=1, presence_penalty=0, frequency_penalty=0),
        _stopping(max_tokens=1),
        _stopping(max_tokens=99),
        _stopping(min_tokens=99),
        _stopping(min_tokens=2, max_tokens=2),
        _sampling(min_p=1, repetition_penalty=10, presence_penalty=-2, frequency_penalty=2),
        _bias(t0=-100.0, t49=100.0),
        _logprobs(num_top=20),
        _logprobs(),
        _stopping(stop=["x" * 256] * 16, stop_token_ids=range(16)),
        Generate(text="hello", client_request_id="é" * 256),
        _ids(*range(99)),
        Generate(text="é" * 500),
        Generate(text="hello", n=1, priority=inference_pb2.PRIORITY_UNSPECIFIED),
    ],
    ids=str,
)
def test_the_last_allowed_value_is_allowed(message: inference_pb2.GenerateRequest) -> None:
    """On the limit is within it, and a neutral value of something unbuilt asks for nothing."""
    assert isinstance(_parse(message), Request)


# -- what is refused


@pytest.mark.parametrize(
    ("message", "kind", "field"),
    [
        (Generate(), BadPromptError, None),
        (Generate(text=""), BadPromptError, None),
        (_ids(), BadPromptError, None),
        (_chat(), BadPromptError, None),
        (_chat(User, inference_pb2.ChatMessage(role="tool", content="x")), BadPromptError, None),
        (_chat(inference_pb2.ChatMessage(role="", content="x")), BadPromptError, None),
        (_chat(inference_pb2.ChatMessage(role="User", content="x")), BadPromptError, None),
        (_sampling(temperature=-1), BadSamplingError, "sampling.temperature"),
        (_sampling(temperature=100.5), BadSamplingError, "sampling.temperature"),
        (_sampling(temperature=math.nan), BadSamplingError, "sampling.temperature"),
        (_sampling(temperature=math.inf), BadSamplingError, "sampling.temperature"),
        (_sampling(top_p=0), BadSamplingError, "sampling.top_p"),
        (_sampling(top_p=-0.5), BadSamplingError, "sampling.top_p"),
        (_sampling(top_p=1.5), BadSamplingError, "sampling.top_p"),
        (_sampling(top_p=math.nan), BadSamplingError, "sampling.top_p"),
        (_sampling(min_p=-0.1), BadSamplingError, "sampling.min_p"),
        (_sampling(min_p=1.1), BadSamplingError, "sampling.min_p"),
        (_sampling(repetition_penalty=0), BadSamplingError, "sampling.repetition_penalty"),
        (_sampling(repetition_penalty=1e-38), BadSamplingError, "sampling.repetition_penalty"),
        (_sampling(repetition_penalty=math.nan), BadSamplingError, "sampling.repetition_penalty"),
        (_sampling(repetition_penalty=11), BadSamplingError, "sampling.repetition_penalty"),
        (_sampling(presence_penalty=2.1), BadSamplingError, "sampling.presence_penalty"),
        (_sampling(frequency_penalty=-2.1), BadSamplingError, "sampling.frequency_penalty"),
        (_sampling(frequency_penalty=math.nan), BadSamplingError, "sampling.frequency_penalty"),
        (_bias(t50=1.0), BadSamplingError, "sampling.logit_bias"),
        (_bias(t1=101.0), BadSamplingError, "sampling.logit_bias"),
        (_bias(t1=math.nan), BadSamplingError, "sampling.logit_bias"),
        (_logprobs(num_top=21), BadSamplingError, "logprobs.num_top"),
        (_stopping(min_tokens=100), BadStopError, "stopping.min_tokens"),
        (_stopping(min_tokens=3, max_tokens=2), BadStopError, "stopping.min_tokens"),
        (Generate(text="hello", client_request_id="x" * 257), BadFieldError, "client_request_id"),
        (Generate(text="hello", n=0), BadSamplingError, "n"),
        (Generate(text="hello", n=5), BadSamplingError, "n"),
        (_stopping(max_tokens=0), BadStopError, "stopping.max_tokens"),
        (_stopping(max_tokens=100), BadStopError, "stopping.max_tokens"),
        (_stopping(stop=[""]), BadStopError, "stopping.stop"),
        (_stopping(stop=["x" * 257]), BadStopError, "stopping.stop"),
        (_stopping(stop=["x"] * 17), BadStopError, "stopping"),
        (_stopping(stop_token_ids=range(17)), BadStopError, "stopping"),
        (_stopping(stop_token_ids=[49, 50]), BadStopError, "stopping.stop_token_ids"),
    ],
    ids=str,
)
def test_what_cannot_be_served_is_refused_with_its_reason(
    message: inference_pb2.GenerateRequest, kind: type[InvalidRequestError], field: str | None
) -> None:
    """The caller's mistake is named by class, and by field where there is one."""
    with pytest.raises(kind) as caught:
        _parse(message)
    assert caught.value.facts().get("field") == field


@pytest.mark.parametrize(
    ("message", "facts"),
    [
        (Generate(text="x" * 1001), {"limit": "1000", "given": "1001", "unit": "bytes"}),
        (Generate(text="é" * 501), {"limit": "1000", "given": "1002", "unit": "bytes"}),
        (Generate(text="x" * 10_000_000), {"limit": "1000", "given": "10000000", "unit": "bytes"}),
        (_chat(User, *[Long] * 2), {"limit": "1000", "given": "1205", "unit": "bytes"}),
        (_chat(*[User] * 100), {"limit": "99", "given": "100", "unit": "messages"}),
        (_ids(*range(100)), {"limit": "99", "given": "100", "unit": "tokens"}),
    ],
    ids=["letters", "bytes-not-letters", "10-mb", "chat", "messages", "tokens"],
)
def test_a_prompt_over_the_limit_is_refused_with_both_numbers(
    message: inference_pb2.GenerateRequest, facts: dict[str, str]
) -> None:
    """Before anything is tokenised, in bytes of text; token ids in tokens."""
    with pytest.raises(PromptTooLongError) as caught:
        _parse(message)
    assert caught.value.facts() == facts


def test_a_bias_names_so_many_tokens_and_no_more() -> None:
    """1,024 of a vocabulary that is larger."""
    limits = make_limits(vocab_size=2000)
    for num_tokens, is_taken in ((1024, True), (1025, False)):
        raw = _bias(**{f"t{token_id}": 1.0 for token_id in range(num_tokens)}).SerializeToString()
        if is_taken:
            assert len(parse_generate(raw, limits).sampling.logit_bias) == num_tokens
        else:
            with pytest.raises(BadSamplingError, match="more than 1024 tokens"):
                parse_generate(raw, limits)


# An unknown field that holds itself, a hundred and fifty times.
NESTED = b"\xa3\x06" * 150 + b"\xa4\x06" * 150


@pytest.mark.parametrize("parse", [parse_generate, parse_tokenize])
@pytest.mark.parametrize(
    "raw",
    [b"\x12\x02\xff\xfe", b"\x0a\xff", b"\x12\x05abc", NESTED],
    ids=["not-utf-8", "cut", "cut-text", "nested"],
)
def test_bytes_that_are_no_message_are_a_bad_prompt(parse: Callable[..., object], raw: bytes) -> None:
    """Text that is not UTF-8 and a message cut off get a proper refusal, not a failure."""
    with pytest.raises(BadPromptError):
        parse(raw, LIMITS)


def test_a_refusal_never_shows_the_prompt() -> None:
    """Whatever is wrong with it, the text stays out of the message, which ends up in logs."""
    secret = "my secret question"
    bad = [
        Generate(text=secret * 100),
        _chat(inference_pb2.ChatMessage(role=secret, content=secret)),
        Generate(text=secret, sampling=Sampling(temperature=-1)),
        Generate(text="x", stopping=Stopping(stop=[secret * 30])),
    ]
    for message in bad:
        with pytest.raises(PacelineError) as caught:
            _parse(message)
        assert "secret" not in str(caught.value) + str(caught.value.facts())


def test_log_probabilities_of_the_prompt_come_with_those_of_the_output() -> None:
    """Without a number of alternatives there are none: the token's own log probability alone."""
    request = _parse(_logprobs(prompt=True))
    assert (request.prompt_logprobs, request.num_top_logprobs) == (True, 0)
    assert not _parse(_logprobs(num_top=3)).prompt_logprobs
    assert not _parse(_logprobs(prompt=False)).prompt_logprobs


@pytest.mark.parametrize(("num_top", "most"), [(0, 299_520), (20, 15_303)])
def test_log_probabilities_of_a_prompt_fit_into_a_message(num_top: int, most: int) -> None:
    """So many entries are taken, one more is refused with both numbers; without a wish for them any length is taken."""
    asking = _parse(_logprobs(prompt=True, num_top=num_top))
    check_prompt_logprobs(asking, most + 1)
    with pytest.raises(BadSamplingError, match=rf"{most + 1} entries .* and {most} such") as caught:
        check_prompt_logprobs(asking, most + 2)
    assert caught.value.facts() == {"field": "logprobs.prompt"}
    check_prompt_logprobs(_parse(_logprobs(num_top=num_top)), most + 2)


def test_the_longest_entries_are_as_long_as_they_are_thought_to_be() -> None:
    """The largest prompt that is taken, with every number at its longest, stays below what a client takes by default."""
    top = [generation_pb2.TopLogprob(token_id=MAX_UINT32, logprob=-1)] * 20
    entry = generation_pb2.TokenLogprob(token_id=MAX_UINT32, logprob=-1, top=top)
    one, two = (inference_pb2.PrefillDone(prompt_logprobs=[entry] * count).ByteSize() for count in (1, 2))
    rest = inference_pb2.GenerateResponse(
        seq=2**64 - 1,
        index=MAX_UINT32,
        prefill_done=inference_pb2.PrefillDone(
            prompt_tokens=MAX_UINT32, cached_tokens=MAX_UINT32, prefill_worker="x" * 255
        ),
    )
    assert 15_303 * (two - one) + rest.ByteSize() + 16 < 4 << 20


# -- priority


@pytest.mark.parametrize(
    ("proto", "priority"),
    [
        (inference_pb2.PRIORITY_UNSPECIFIED, Priority.STANDARD),
        (inference_pb2.PRIORITY_REALTIME, Priority.REALTIME),
        (inference_pb2.PRIORITY_STANDARD, Priority.STANDARD),
        (inference_pb2.PRIORITY_BATCH, Priority.BATCH),
    ],
)
def test_a_priority_is_taken(proto: inference_pb2.Priority, priority: Priority) -> None:
    """Each class of the contract is one of ours, and whoever says nothing is the usual one."""
    assert _parse(Generate(text="x", priority=proto)).priority is priority


@pytest.mark.parametrize("number", [4, -1, 2**31 - 1])
def test_a_number_that_no_priority_has_is_refused(number: int) -> None:
    """A newer client's class is not taken for another one; the refusal says which there are."""
    message = Generate(text="x")
    message.priority = number  # type: ignore[assignment] # what the wire can carry
    with pytest.raises(BadSamplingError, match=f"is {number}, which is none of .*PRIORITY_BATCH") as caught:
        _parse(message)
    assert caught.value.facts() == {"field": "priority"}


# -- nothing is silently ignored

# Two messages for every field that is honoured: what they become differs.
BUILT = {
    "GenerateRequest.n": (Generate(text="x"), Generate(text="x", n=2)),
    "GenerateRequest.priority": (
        Generate(text="x"),
        Generate(text="x", priority=inference_pb2.PRIORITY_BATCH),
    ),
    "GenerateRequest.client_request_id": (Generate(text="x"), Generate(text="x", client_request_id="mine")),
    "GenerateRequest.text": (Generate(text="x"), Generate(text="y")),
    "GenerateRequest.token_ids": (_ids(1), _ids(2)),
    "GenerateRequest.chat": (_chat(User), _chat(User, User)),
    "TokenIds.ids": (_ids(1), _ids(1, 2)),
    "Chat.messages": (_chat(User), _chat(User, User)),
    "ChatMessage.role": (_chat(User), _chat(inference_pb2.ChatMessage(role="system", content="hello"))),
    "ChatMessage.content": (_chat(User), _chat(inference_pb2.ChatMessage(role="user", content="bye"))),
    "SamplingParams.temperature": (_sampling(), _sampling(temperature=0.5)),
    "SamplingParams.top_p": (_sampling(), _sampling(top_p=0.5)),
    "SamplingParams.top_k": (_sampling(), _sampling(top_k=1)),
    "SamplingParams.min_p": (_sampling(), _sampling(min_p=0.1)),
    "SamplingParams.repetition_penalty": (_sampling(), _sampling(repetition_penalty=1.1)),
    "SamplingParams.presence_penalty": (_sampling(), _sampling(presence_penalty=0.1)),
    "SamplingParams.frequency_penalty": (_sampling(), _sampling(frequency_penalty=-0.1)),
    "SamplingParams.logit_bias": (_sampling(), _bias(t1=0.5)),
    "SamplingParams.seed": (_sampling(seed=1), _sampling(seed=2)),
    "StopConditions.max_tokens": (_stopping(), _stopping(max_tokens=1)),
    "StopConditions.min_tokens": (_stopping(), _stopping(min_tokens=1)),
    "StopConditions.stop": (_stopping(), _stopping(stop=["x"])),
    "StopConditions.stop_token_ids": (_stopping(), _stopping(stop_token_ids=[1])),
    "StopConditions.ignore_eos": (_stopping(), _stopping(ignore_eos=True)),
    "StopConditions.include_stop": (_stopping(), _stopping(include_stop=True)),
    "LogprobOptions.num_top": (_logprobs(), _logprobs(num_top=1)),
    "LogprobOptions.prompt": (_logprobs(), _logprobs(prompt=True)),
    "CacheOptions.bypass": (
        Generate(text="x"),
        Generate(text="x", cache=inference_pb2.CacheOptions(bypass=True)),
    ),
    # An empty name is one that nobody has registered, and not the same as none.
    "CacheOptions.public_prefix": (
        Generate(text="x"),
        Generate(text="x", cache=inference_pb2.CacheOptions(public_prefix="")),
    ),
}
# What only holds others: their fields are looked at one by one.
CONTAINERS = {f"GenerateRequest.{name}" for name in ("sampling", "stopping", "logprobs", "cache")}


def _all_fields(message: type[Message]) -> set[str]:
    """Every field of a message and of the messages in it, by message and name."""
    found: set[str] = set()
    todo = [message.DESCRIPTOR]
    while todo:
        descriptor = todo.pop()
        for field in descriptor.fields:
            found.add(f"{descriptor.name}.{field.name}")
            if field.message_type is not None and not field.message_type.GetOptions().map_entry:
                todo.append(field.message_type)
    return found


def test_every_field_of_the_contract_is_honoured() -> None:
    """A field that is added to the contract fails here until it makes a difference, or is refused."""
    assert _all_fields(Generate) == set(BUILT) | CONTAINERS


@pytest.mark.parametrize("name", list(BUILT))
def test_a_field_that_is_built_makes_a_difference(name: str) -> None:
    """Two values of it give two requests."""
    one, other = (Generate.FromString(message.SerializeToString()) for message in BUILT[name])
    for message in (one, other):
        if not message.sampling.HasField("seed"):
            message.sampling.seed = 1
    assert _parse(one) == _parse(one)
    assert _parse(one) != _parse(other)


# -- tokenize


def test_tokenize_takes_text_and_chat() -> None:
    """Exactly as Generate takes them."""
    text = inference_pb2.TokenizeRequest(text="hello")
    chat = inference_pb2.TokenizeRequest(chat=inference_pb2.Chat(messages=[User]))
    assert parse_tokenize(text.SerializeToString(), LIMITS) == "hello"
    assert parse_tokenize(chat.SerializeToString(), LIMITS) == (ChatMessage("user", "hello"),)


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        (inference_pb2.TokenizeRequest(), BadPromptError),
        (inference_pb2.TokenizeRequest(text=""), BadPromptError),
        (inference_pb2.TokenizeRequest(chat=inference_pb2.Chat()), BadPromptError),
        (inference_pb2.TokenizeRequest(text="x" * 1001), PromptTooLongError),
    ],
    ids=str,
)
def test_tokenize_refuses_what_generate_refuses(
    message: inference_pb2.TokenizeRequest, kind: type[InvalidRequestError]
) -> None:
    """Nothing empty and nothing over the limit is tokenised."""
    with pytest.raises(kind):
        parse_tokenize(message.SerializeToString(), LIMITS)
