"""The log probabilities of one attempt's prompt, gathered chunk by chunk: the client gets all of them at once, or none."""

from paceline.core.errors import PeerLostError
from paceline.core.request import SequenceSpec
from paceline.v1 import engine_pb2, generation_pb2


class PromptScores:
    """Complete at once when nothing was asked for. The entries stay messages: this process only passes them on."""

    def __init__(self, spec: SequenceSpec) -> None:
        self._num_expected = len(spec.prompt_ids) - 1 if spec.prompt_logprobs else 0
        self._logprobs: list[generation_pb2.TokenLogprob] = []

    @property
    def is_complete(self) -> bool:
        """Whether every prompt token but the first has its entry."""
        return len(self._logprobs) >= self._num_expected

    def add(self, message: engine_pb2.PromptScored) -> None:
        """Takes those of a chunk; raises PeerLostError when some before them are missing."""
        next_index = len(self._logprobs) + 1
        if message.first_index != next_index:
            raise PeerLostError(f"log probabilities from prompt token {next_index} on are missing")
        self._logprobs += message.logprobs

    def require_complete(self) -> None:
        """Raises PeerLostError when a worker goes on to the output, and some are missing."""
        if not self.is_complete:
            raise PeerLostError(
                f"log probabilities from prompt token {len(self._logprobs) + 1} on are missing"
            )

    def take(self) -> tuple[generation_pb2.TokenLogprob, ...]:
        """All of them; raises PeerLostError when some are missing."""
        self.require_complete()
        return tuple(self._logprobs)
