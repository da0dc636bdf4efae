"""Streams one answer from a Paceline server, and shows how long it took and where it was computed.

python examples/python/generate.py "What is the capital of France?" [127.0.0.1:50051]
"""

import asyncio
import sys

from paceline.client import DEFAULT_ADDRESS, PacelineClient
from paceline.client_error import PacelineRpcError
from paceline.v1 import inference_pb2


async def main(prompt: str, address: str = DEFAULT_ADDRESS) -> None:
    """Asks one question."""
    async with PacelineClient(address) as client:
        messages = [{"role": "user", "content": prompt}]
        async for event in client.generate(messages, temperature=0, max_tokens=100):
            print(event.delta.text, end="", flush=True)
            if event.HasField("finish"):
                report(event.finish)


def report(finish: inference_pb2.Finish) -> None:
    """One line about the answer, on stderr."""
    usage, timeline = finish.usage, finish.timeline
    workers = f"{timeline.prefill_worker} -> {timeline.decode_worker}"
    print(f"\n{usage.output_tokens} tokens, {usage.cached_tokens} cached, {workers}", file=sys.stderr)


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3) or sys.argv[1].startswith("--"):
        sys.exit(f"usage: {sys.argv[0]} PROMPT [HOST:PORT]")
    try:
        asyncio.run(main(*sys.argv[1:]))
    except PacelineRpcError as error:
        sys.exit(f"error: {error}")
