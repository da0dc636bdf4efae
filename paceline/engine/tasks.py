"""What the runner is asked about the logits of a sequence: which tokens to choose by them, and which to score."""

from dataclasses import replace

from paceline.engine.sequence import Sequence
from paceline.engine.step import SampleTask, ScoreTask


def sample_tasks(sequence: Sequence) -> tuple[SampleTask, ...]:
    """The next token of each candidate."""
    if sequence.lasting_tasks is not None:
        return sequence.lasting_tasks
    spec, banned_ids = sequence.spec, sequence.banned_ids
    needs_history = spec.sampling.has_penalties
    task = SampleTask(
        params=spec.sampling,
        prompt_ids=spec.prompt_ids if needs_history else (),
        output_ids=tuple(sequence.token_ids[len(spec.prompt_ids) :]) if needs_history else (),
        banned_ids=banned_ids,
        num_top_logprobs=spec.num_top_logprobs,
    )
    tasks = tuple(replace(task, candidate=candidate) for candidate in sequence.candidates)
    if not needs_history and not banned_ids:
        sequence.lasting_tasks = tasks
    return tasks


def score_task(sequence: Sequence, start: int, end: int) -> ScoreTask | None:
    """What the tokens at [start, end) tell about those that follow them in the prompt, if that has not been told yet."""
    prompt_ids = sequence.spec.prompt_ids
    first = max(start + 1, sequence.num_scored_tokens)
    target_ids = prompt_ids[first : end + 1]
    if not target_ids:
        return None
    return ScoreTask(first - 1 - start, target_ids, sequence.spec.num_top_logprobs or 0)
