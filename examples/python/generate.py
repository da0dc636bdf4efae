"""Streams one answer from a Paceline server, and shows how long it was and where it was computed.

python examples/python/generate.py [--address 127.0.0.1:50051] "What is the capital of France?"

The API key, for a server that wants one, is in PACELINE_API_KEY. Ctrl-C cancels the request on the server.
"""

import argparse
import asyncio
import os
import signal
import sys

from paceline.client import DEFAULT_ADDRESS, PacelineClient
from paceline.client_error import PacelineRpcError
from paceline.v1 import generation_pb2, inference_pb2


async def generate(address: str, prompt: str) -> None:
    """Asks one question. Ctrl-C is the event loop's own, which it wakes up for at once."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, task.cancel)
    async with PacelineClient(address, api_key=os.environ.get("PACELINE_API_KEY")) as client:
        messages = [{"role": "user", "content": prompt}]
        async for event in client.generate(messages, temperature=0, max_tokens=100):
            print(event.delta.text, end="", flush=True)
            if event.HasField("finish"):
                show_finish(event.finish)


def show_finish(finish: inference_pb2.Finish) -> None:
    """One line about the answer, on stderr."""
    reason = generation_pb2.FinishReason.Name(finish.reason)
    usage, timeline = finish.usage, finish.timeline
    workers = f"{timeline.prefill_worker} -> {timeline.decode_worker}"
    print(
        f"\n{reason}: {usage.output_tokens} tokens, {usage.cached_tokens} cached, {workers}", file=sys.stderr
    )


def show_refusal(error: PacelineRpcError) -> None:
    """What the server tells about a refusal."""
    print(f"error: {error.message}", file=sys.stderr)
    if error.reason:
        print(f"  reason: {error.reason}", file=sys.stderr)
    for name, value in error.facts.items():
        print(f"  {name}: {value}", file=sys.stderr)
    if error.retry_after_s is not None:
        print(f"  retry after: {error.retry_after_s:.1f} s", file=sys.stderr)


def main() -> int:
    """Gives the exit status."""
    parser = argparse.ArgumentParser(description="Streams one answer from a Paceline server.")
    parser.add_argument("--address", default=DEFAULT_ADDRESS, metavar="HOST:PORT")
    parser.add_argument("prompt", metavar="PROMPT")
    args = parser.parse_args()
    try:
        asyncio.run(generate(args.address, args.prompt))
    except PacelineRpcError as error:
        show_refusal(error)
        return 1
    except asyncio.CancelledError:
        print("\ncancelled", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
