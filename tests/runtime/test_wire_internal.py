"""What our own processes say to each other survives the wire unchanged."""

from dataclasses import fields
from typing import Any

import pytest
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.block_hash import BlockHash
from paceline.core.errors import InvariantError
from paceline.core.fingerprint import ModelFingerprint
from paceline.core.request import (
    BootEpoch,
    FinishReason,
    FirstToken,
    LeaseId,
    Priority,
    RequestId,
    SamplingParams,
    SequenceId,
    SequenceSpec,
    TokenLogprob,
    WorkerId,
)
from paceline.core.ticket import KvTicket
from paceline.runtime.wire_internal import (
    fingerprint_from_proto,
    fingerprint_to_proto,
    finish_reason_from_proto,
    finish_reason_to_proto,
    first_token_from_proto,
    first_token_to_proto,
    logprob_to_proto,
    priority_from_proto,
    priority_to_proto,
    spec_from_proto,
    spec_to_proto,
    ticket_from_proto,
    ticket_to_proto,
)
from paceline.v1 import engine_pb2, generation_pb2, inference_pb2
from tests.factories import FINGERPRINT, make_spec, make_ticket

Uint32 = st.integers(0, 2**32 - 1)
Uint64 = st.integers(0, 2**64 - 1)
Text = st.text(max_size=8)
Float32 = st.floats(0, 100, width=32)
Fingerprints = st.builds(ModelFingerprint, Text, Text, Text, Text, Text, Text, Text, Text, Uint32, Text)
Tickets = st.builds(
    KvTicket,
    lease_id=Text.map(LeaseId),
    owner_id=Text.map(WorkerId),
    owner_address=Text,
    boot_epoch=Uint64.map(BootEpoch),
    fingerprint=Fingerprints,
    block_hashes=st.lists(st.binary(min_size=16, max_size=16).map(BlockHash), max_size=3).map(tuple),
    num_blocks=Uint32,
)
Ids = st.lists(Uint32, max_size=4).map(tuple)
Specs = st.builds(
    SequenceSpec,
    sequence_id=st.builds(SequenceId, Text.map(RequestId), Uint32),
    prompt_ids=st.lists(Uint32, min_size=1, max_size=4).map(tuple),
    sampling=st.builds(
        SamplingParams,
        temperature=Float32,
        top_p=Float32,
        top_k=Uint32,
        min_p=Float32,
        repetition_penalty=Float32,
        presence_penalty=Float32,
        frequency_penalty=Float32,
        seed=Uint64,
        logit_bias=st.dictionaries(Uint32, Float32, max_size=3).map(lambda bias: tuple(sorted(bias.items()))),
    ),
    min_tokens=Uint32,
    num_top_logprobs=st.none() | st.integers(0, 20),
    candidates=st.sets(st.integers(0, 20), min_size=1).map(sorted).map(tuple),
    prompt_logprobs=st.booleans(),
    max_tokens=st.integers(5, 2**32 - 1),
    output_ids=Ids,
    stop_token_ids=Ids,
    ignore_eos=st.booleans(),
    bypass_cache=st.booleans(),
    cache_scope=Text,
    time_budget_s=st.none() | st.floats(-10, 1e6),
    priority=st.sampled_from(Priority),
    tenant=Text,
    tenant_weight=st.integers(1, 2**32 - 1),
)


def _sent(message: Any) -> Any:
    """What the other side reads."""
    return type(message).FromString(message.SerializeToString())


@given(fingerprint=Fingerprints)
def test_a_fingerprint_survives_the_wire(fingerprint: ModelFingerprint) -> None:
    """Every field, so that a comparison there is a comparison here."""
    assert fingerprint_from_proto(_sent(fingerprint_to_proto(fingerprint))) == fingerprint


@given(ticket=Tickets)
def test_a_ticket_survives_the_wire(ticket: KvTicket) -> None:
    """Every field of it, over the router and back."""
    assert ticket_from_proto(_sent(ticket_to_proto(ticket))) == ticket


@given(spec=Specs)
def test_a_sequence_survives_the_wire(spec: SequenceSpec) -> None:
    """Context and sequence together are the whole of it; no budget is not a budget of 0."""
    context, sequence = spec_to_proto(spec)
    assert spec_from_proto(_sent(context), _sent(sequence)) == spec


Logprobs = st.builds(
    TokenLogprob, Uint32, Float32, st.lists(st.tuples(Uint32, Float32), max_size=3).map(tuple)
)


@given(token_id=Uint32, reason=st.none() | st.sampled_from(FinishReason), logprob=st.none() | Logprobs)
def test_a_first_token_survives_the_wire(
    token_id: int, reason: FinishReason | None, logprob: TokenLogprob | None
) -> None:
    """With its stop state, which decides whether decode goes on, and its log probability."""
    first = FirstToken(token_id, reason, logprob)
    assert first_token_from_proto(_sent(first_token_to_proto(first))) == first


def test_every_finish_reason_has_a_number_and_every_number_a_reason() -> None:
    """Ours and the contract's are the same; unspecified means not ended."""
    numbers = set(generation_pb2.FinishReason.values())
    assert {finish_reason_to_proto(reason) for reason in (None, *FinishReason)} == numbers
    for reason in (None, *FinishReason):
        assert finish_reason_from_proto(finish_reason_to_proto(reason)) is reason


def test_every_priority_has_a_number_and_every_number_a_priority() -> None:
    """Ours and the contract's are the same, and only unspecified stands for another one."""
    numbers = {priority_to_proto(priority): priority for priority in Priority}
    assert {inference_pb2.PRIORITY_UNSPECIFIED, *numbers} == set(inference_pb2.Priority.values())
    assert {proto: priority_from_proto(proto) for proto in numbers} == numbers


def test_a_priority_that_no_router_sends_is_our_own_bug() -> None:
    """A number without a class is refused as INVARIANT; none at all is the usual class."""
    sequence = engine_pb2.SequenceSpec(prompt_ids=[1], max_tokens=1, candidates=[0])
    context = engine_pb2.CallContext(request_id="r")
    assert spec_from_proto(context, sequence).priority is Priority.STANDARD
    context.priority = 99  # type: ignore[assignment] # what the wire can carry
    with pytest.raises(InvariantError, match="unknown priority, 99"):
        spec_from_proto(context, sequence)


LOGPROB = TokenLogprob(7, -0.5, ((7, -0.5), (8, -1.5)))
FIRST = FirstToken(7, FinishReason.EOS, LOGPROB, candidate=2)


@pytest.mark.parametrize(
    ("message", "value"),
    [
        (logprob_to_proto(LOGPROB), LOGPROB),
        (fingerprint_to_proto(FINGERPRINT), FINGERPRINT),
        (ticket_to_proto(make_ticket()), make_ticket()),
        (first_token_to_proto(FIRST), FIRST),
    ],
    ids=["logprob", "fingerprint", "ticket", "first-token"],
)
def test_message_and_value_have_the_same_fields(message: Message, value: Any) -> None:
    """A field that is added to one of them and not to the other is noticed."""
    assert {f.name for f in message.DESCRIPTOR.fields} == {f.name for f in fields(value)}
    assert len(message.ListFields()) == len(message.DESCRIPTOR.fields)


def test_context_and_sequence_carry_every_field_of_a_spec() -> None:
    """None is left at its default when all are set, and no sampling field that is built is left out."""
    sampling = SamplingParams(temperature=0.5, top_p=0.5, top_k=3, seed=9, logit_bias=((1, 2.0),))
    spec = make_spec(
        attempt=1,
        output_ids=(1,),
        sampling=sampling,
        stop_token_ids=(2,),
        ignore_eos=True,
        min_tokens=1,
        num_top_logprobs=0,
        prompt_logprobs=True,
        bypass_cache=True,
        cache_scope="tenant",
        time_budget_s=5.0,
        priority=Priority.REALTIME,
        tenant="acme",
    )
    context, sequence = spec_to_proto(spec)
    for message in (context, sequence):
        assert len(message.ListFields()) == len(message.DESCRIPTOR.fields)
    assert {f.name for f, _ in sequence.sampling.ListFields()} == {f.name for f in fields(SamplingParams)}


@pytest.mark.parametrize(
    "sequence",
    [
        engine_pb2.SequenceSpec(max_tokens=3, candidates=[0]),
        engine_pb2.SequenceSpec(prompt_ids=[1], candidates=[0]),
        engine_pb2.SequenceSpec(prompt_ids=[1], output_ids=[2, 3], max_tokens=2, candidates=[0]),
    ],
    ids=["no-prompt", "no-limit", "no-token-left"],
)
def test_work_that_no_router_sends_is_our_own_bug(sequence: engine_pb2.SequenceSpec) -> None:
    """An empty prompt, or nothing left to generate, is refused as INVARIANT; with one more it is work."""
    with pytest.raises(InvariantError):
        spec_from_proto(engine_pb2.CallContext(request_id="r"), sequence)
    sequence.prompt_ids.append(1)
    sequence.max_tokens += 1
    assert spec_from_proto(engine_pb2.CallContext(request_id="r"), sequence).prompt_ids


@pytest.mark.parametrize("field", ["request_id", "tenant", "cache_scope"])
def test_names_that_no_router_makes_are_our_own_bug(field: str) -> None:
    """256 characters are more than any of them has; one more is refused as INVARIANT."""
    sequence = engine_pb2.SequenceSpec(prompt_ids=[1], max_tokens=1, candidates=[0])
    context = engine_pb2.CallContext()
    setattr(context, field, "x" * 256)
    assert spec_from_proto(context, sequence).prompt_ids == (1,)
    setattr(context, field, "x" * 257)
    with pytest.raises(InvariantError, match="too long"):
        spec_from_proto(context, sequence)


@pytest.mark.parametrize(
    "candidates", [[], [1, 1], [2, 1], list(range(257))], ids=["none", "twice", "not in order", "too many"]
)
def test_candidates_that_no_router_sends_are_our_own_bug(candidates: list[int]) -> None:
    """At least one, each once, ascending: anything else is refused as INVARIANT."""
    sequence = engine_pb2.SequenceSpec(prompt_ids=[1], max_tokens=1, candidates=candidates)
    with pytest.raises(InvariantError, match="candidates"):
        spec_from_proto(engine_pb2.CallContext(request_id="r"), sequence)
    for fine in ((1, 2), tuple(range(256))):
        sequence.candidates[:] = fine
        assert spec_from_proto(engine_pb2.CallContext(request_id="r"), sequence).candidates == fine
