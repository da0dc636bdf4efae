"""The process that OpenVINO GenAI's pipeline has to itself: requests come as lines of its standard input, answers leave as lines.

    <- {"id": 7, "prompt_ids": [1, 2], "num_output_tokens": 3}
    -> {"id": 7, "token_ids": [5], "ended": false}        or {"id": 7, "refused": "..."}

It says {"unable": "..."} instead, once, when it cannot load the model. It imports nothing of ours, so that its memory is OpenVINO's.
"""

import json
import os
import queue
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

_PRECISION = "INFERENCE_PRECISION_HINT"
Tell = Callable[[Mapping[str, Any]], None]
# None: no more of them come.
Requests = queue.SimpleQueue[dict[str, Any] | None]


def main(argv: Sequence[str]) -> int:
    """A directory, and settings as a JSON object; ends when its input does."""
    tell = _own_output()
    try:
        answerer = Answerer(argv[0], json.loads(argv[1]), tell)
    except (ImportError, RuntimeError, AttributeError, TypeError, ValueError) as error:
        tell({"unable": str(error).strip() or type(error).__name__})
        return 1
    requests: Requests = queue.SimpleQueue()
    threading.Thread(target=_read, args=(requests,), daemon=True).start()
    answerer.run(requests)
    return 0


class Answerer:
    """The pipeline, stepped for as long as it has anything to do."""

    def __init__(self, directory: str, settings: Mapping[str, str], tell: Tell) -> None:
        import openvino  # noqa: PLC0415 - what is missing is told to whoever started this
        import openvino_genai  # noqa: PLC0415 - the same

        self._tensor, self._genai, self._tell = openvino.Tensor, openvino_genai, tell
        self._handles: dict[int, Any] = {}
        scheduler = openvino_genai.SchedulerConfig()
        # Ours has one too; off by default there.
        scheduler.enable_prefix_caching = True
        for name, value in settings.items():
            if name.islower():
                _set(scheduler, name, value)
        properties = {_PRECISION: "bf16"} | {
            name: value for name, value in settings.items() if not name.islower()
        }
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(directory, scheduler, "CPU", properties)

    def run(self, requests: Requests) -> None:
        """Until there are no more requests."""
        while True:
            for request in _waiting(requests, must_wait=not self._handles):
                if request is None:
                    return
                self._add(request)
            if self._handles:
                self._pipeline.step()
            for number in list(self._handles):
                self._tell_new(number)

    def _add(self, request: Mapping[str, Any]) -> None:
        import numpy as np  # noqa: PLC0415 - openvino brings it

        config = self._genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = request["num_output_tokens"], True, False
        prompt = self._tensor(np.array([request["prompt_ids"]], dtype=np.int64))
        try:
            self._handles[request["id"]] = self._pipeline.add_request(request["id"], prompt, config)
        except RuntimeError as error:
            self._tell({"id": request["id"], "refused": str(error).strip()})

    def _tell_new(self, number: int) -> None:
        handle = self._handles[number]
        token_ids = list[int]()
        while handle.can_read():
            token_ids += [each for output in handle.read().values() for each in output.generated_ids]
        status, statuses = handle.get_status(), self._genai.GenerationStatus
        if status == statuses.IGNORED:
            self._tell({"id": number, "refused": "it has no room for this request"})
        elif token_ids or status != statuses.RUNNING:
            self._tell({"id": number, "token_ids": token_ids, "ended": status != statuses.RUNNING})
        if status != statuses.RUNNING:
            del self._handles[number]


def _set(scheduler: Any, name: str, value: str) -> None:
    if not hasattr(scheduler, name):
        raise AttributeError(f"its scheduler has no setting {name}")
    setattr(scheduler, name, json.loads(value.lower()))


def _waiting(requests: Requests, *, must_wait: bool) -> Iterator[dict[str, Any] | None]:
    if must_wait:
        yield requests.get()
    while not requests.empty():
        yield requests.get()


def _read(requests: Requests) -> None:
    for line in sys.stdin:
        requests.put(json.loads(line))
    requests.put(None)


def _own_output() -> Tell:
    """Standard output for answers alone: what the library prints goes where errors go."""
    answers = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)

    def tell(answer: Mapping[str, Any]) -> None:
        """One line."""
        answers.write(json.dumps(answer) + "\n")

    return tell


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
