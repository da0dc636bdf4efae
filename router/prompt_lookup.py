"""Asks the prefix table about a prompt: who holds how much of it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from paceline.core.block_hash import chain_root, hash_full_blocks
from paceline.core.prefix import WorkerKey
from paceline.prefix_index.index import PrefixLookup
from router.hash_ring import prompt_key, session_key
from router.job import Job
from router.views import PromptFacts, WorkerView


@dataclass(frozen=True, slots=True)
class PromptLookup:
    """Looks up in one table."""

    index: PrefixLookup

    async def facts(self, job: Job, workers: Iterable[WorkerView]) -> PromptFacts:
        """What is known of a job's next attempt. It may take a moment, in which the workers' load changes."""
        held = await self.held(job, workers) if job.held_blocks is None else job.held_blocks
        scope = job.spec.cache_scope
        return PromptFacts(
            num_tokens=len(job.spec.prompt_ids) + len(job.output_ids),
            held_blocks=held,
            failed_on=frozenset(job.failed_on),
            num_candidates=len(job.candidates),
            max_tokens=max(0, job.spec.max_tokens - len(job.output_ids)),
            # Of the prompt alone: what has come of it so far does not change where it belongs.
            ring_key=session_key(job.session_id, scope)
            if job.session_id
            else prompt_key(job.spec.prompt_ids, scope),
        )

    async def held(self, job: Job, workers: Iterable[WorkerView]) -> dict[WorkerKey, int]:
        """How many leading blocks of a job's next attempt each worker holds."""
        known_ids, scope = job.spec.prompt_ids + job.output_ids, job.spec.cache_scope
        held: dict[WorkerKey, int] = {}
        if not job.spec.bypass_cache and not job.owes_prompt_logprobs:
            # One, unless workers cut their blocks in different ways.
            for cut in {(worker.fingerprint, worker.block_size) for worker in workers}:
                held |= await self._held(known_ids, scope, *cut)
        return held

    async def _held(
        self, token_ids: Sequence[int], scope: str, fingerprint: bytes, block_size: int
    ) -> dict[WorkerKey, int]:
        """How many leading blocks each worker of this fingerprint holds, as far as the table knows."""
        root = chain_root(fingerprint, scope)
        return await self.index.lookup(hash_full_blocks(root, token_ids, block_size, scope))
