"""Where workers are, by their own words in Redis: each says it again every few seconds, and is forgotten when it stops.

    paceline:workers:<tier>      hash: address -> "<boot epoch>:<end>:<fingerprint>:<worker id>"

An entry ends at `end`, in seconds of the server's own clock, and its key with the last of its entries. One key a tier, so each
script works on a Redis Cluster as it is. Only the address is followed; the rest is for whoever looks at the table.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from paceline.core.prefix import WorkerKey
from paceline.prefix_index.redis_calls import NoAnswer, RedisCalls
from paceline.runtime.addresses import is_address

Tier = Literal["prefill", "decode"]

# Three times as long as a worker is silent between two words (paceline/worker/registrar.py).
TTL_S = 15

_KEY = "paceline:workers:"

# KEYS: a tier. ARGV: address, boot epoch, seconds until the entry ends, "<fingerprint>:<worker id>".
# A key lives as long as its youngest field, so what older ones outlive is taken out here, and garbage with it. Gives 1 once it is there.
REGISTER = """
local now = tonumber(redis.call('TIME')[1])
local value = ARGV[2] .. ':' .. (now + ARGV[3]) .. ':' .. ARGV[4]
if type(redis.pcall('HSET', KEYS[1], ARGV[1], value)) ~= 'number' then return 0 end
redis.call('EXPIRE', KEYS[1], ARGV[3])
local fields = redis.call('HGETALL', KEYS[1])
for f = 1, #fields, 2 do
  local ends = string.match(fields[f + 1], '^%d+:(%d+):')
  if not ends or tonumber(ends) < now then redis.call('HDEL', KEYS[1], fields[f]) end
end
return 1
"""

# ARGV: address, boot epoch. What another life has said there since stays.
LEAVE = """
local value, own = redis.pcall('HGET', KEYS[1], ARGV[1]), ARGV[2] .. ':'
if type(value) == 'string' and string.sub(value, 1, #own) == own then redis.call('HDEL', KEYS[1], ARGV[1]) end
return 0
"""

# Gives the addresses whose entries have not ended.
LIST = """
local now = tonumber(redis.call('TIME')[1])
local fields, there = redis.pcall('HGETALL', KEYS[1]), {}
for f = 1, #fields, 2 do
  local ends = string.match(fields[f + 1], '^%d+:(%d+):')
  if ends and tonumber(ends) >= now then there[#there + 1] = fields[f] end
end
return there
"""


@dataclass(frozen=True, slots=True)
class Registration:
    """What a worker says of itself."""

    tier: Tier
    address: str
    worker: WorkerKey
    fingerprint: bytes


class WorkerTable:
    """The table in one Redis. No call raises for what happens to it, and none lasts long."""

    def __init__(self, calls: RedisCalls) -> None:
        self._calls = calls

    async def register(self, registration: Registration) -> bool:
        """The worker is there, for `TTL_S` seconds more; whether the table has heard it."""
        said = f"{registration.fingerprint.hex()}:{registration.worker.worker_id}"
        epoch = str(registration.worker.boot_epoch)
        reply = await self._run(REGISTER, registration.tier, [registration.address, epoch, TTL_S, said])
        return reply == 1

    async def leave(self, registration: Registration) -> None:
        """The worker is not to be found there any more; an entry of its next life stays."""
        # A word that was given up may still be under way, and would stand after this one.
        if self._calls.under_way:
            await asyncio.wait(set(self._calls.under_way))
        arguments = [registration.address, str(registration.worker.boot_epoch)]
        await self._run(LEAVE, registration.tier, arguments)

    async def addresses(self, tier: Tier) -> frozenset[str] | None:
        """Where workers of a tier are; None when the table does not say. What cannot be an address is left out."""
        reply = await self._run(LIST, tier, [])
        if not isinstance(reply, list):
            return None
        texts = (each.decode(errors="replace") for each in reply if isinstance(each, bytes))
        return frozenset(text for text in texts if is_address(text))

    async def aclose(self) -> None:
        """Lets go of connections."""
        await self._calls.aclose()

    async def _run(self, script: str, tier: Tier, arguments: Sequence[str | int | bytes]) -> object:
        call = partial(self._calls.run_script, script, [_KEY + tier], arguments)
        reply = await self._calls.answer(call, self._calls.limit_s)
        return None if isinstance(reply, NoAnswer) else reply
