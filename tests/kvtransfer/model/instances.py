"""The systems that are explored: small ones in seconds, and large ones, which take minutes."""

from tests.kvtransfer.model.words import Instance

SMALL: dict[str, Instance] = {
    "one of each": Instance(num_attempts=2, crashes=1, losses=1, leaves=1),
    "disorder": Instance(num_attempts=2, disorders=1, leaves=1),
    "written in place": Instance(num_attempts=2, in_place=True, crashes=1, leaves=1, ttl_ticks=2),
    "two requests that grow": Instance(num_requests=2, decode_pool=4, grows=True, has_loans=True),
    "two requests that begin alike": Instance(num_requests=2, shares_prefix=True, leaves=1),
    "two of each": Instance(num_prefill=2, num_decode=2, num_requests=2),
    "loans both ways": Instance(num_requests=2, decode_pool=3, has_loans=True, shares_prefix=True),
    "loans in place": Instance(num_attempts=2, has_loans=True, in_place=True, crashes=1),
    "an odd worker": Instance(num_decode=2, num_attempts=2, has_odd_worker=True),
}
LARGE: dict[str, Instance] = {
    "everything goes wrong once": Instance(num_attempts=2, crashes=1, losses=1, disorders=1, leaves=1),
    "the same in place": Instance(
        num_attempts=2, in_place=True, crashes=1, losses=1, disorders=1, leaves=1, ttl_ticks=2
    ),
    "recalls of those that lost their blocks": Instance(
        num_requests=2, prefill_pool=3, decode_pool=4, grows=True, has_loans=True
    ),
    "loans of what is written in place": Instance(
        num_attempts=2, has_loans=True, in_place=True, crashes=1, leaves=1
    ),
    "two requests and a crash": Instance(num_requests=2, num_attempts=2, crashes=1),
    "full": Instance(num_prefill=2, num_decode=2, num_requests=2, num_attempts=2, leaves=1),
}
