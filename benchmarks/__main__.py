"""`./run bench NAME`: runs one benchmark."""

import argparse
import importlib
import sys
from collections.abc import Sequence

from paceline.core.errors import PacelineError

BENCHMARKS = {
    "exactness": "exact mode: bits over random schedules, and its cost beside fast mode",
    "fit": "real steps of a model, and the simulator's cost model fitted to them",
    "scheduling": "what each policy is worth: batching, cushion, victims, lanes, and what the scheduler costs",
    "gpu": "on a GPU: kernels beside their plain forms, and decode and prefill beside the roofline",
    "kv": "the hand-over: bytes a second by transport, beside a plain copy",
    "kv-dtype": "KV in 8 and 4 bits: perplexity and greedy choices beside plain KV, and bytes",
    "quantization": "weights in 8 and 4 bits: perplexity, greedy choices, and steps beside the plain weights'",
    "roofline": "memory bandwidth and matrix products of this machine, and our share of them; where a step's time goes",
    "router": "what the router adds to a request and to a token, and how many one process carries",
    "routing": "placement policies, simulated and on a real 2P2D: cache hits, TTFT, how evenly load is spread",
    "serve": "a whole server under load, as users see it; beside vLLM, llama.cpp, OpenVINO GenAI",
    "simulator": "a simulated run beside a real one of the same trace, and the simulator's speed",
}
# Where a benchmark is not in the module of its name.
_MODULES = {"simulator": "simulator_accuracy", "roofline": "roofline.command", "serve": "serve.command"}


def main(argv: Sequence[str]) -> int:
    """The benchmark's exit status; each has a `main` of its own and options of its own."""
    about = "\n".join(f"  {name:<12} {text}" for name, text in BENCHMARKS.items())
    parser = argparse.ArgumentParser(
        "./run bench",
        description=f"Benchmarks:\n{about}\n\n`./run bench NAME --help` explains one.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", metavar="NAME", choices=sorted(BENCHMARKS))
    name = parser.parse_args(argv[:1]).name
    module = importlib.import_module(f"benchmarks.{_MODULES.get(name, name.replace('-', '_'))}")
    status: int = module.main(argv[1:])
    return status


def run(argv: Sequence[str]) -> int:
    """The same, for a shell: what cannot be, and Ctrl-C, are a status and no traceback."""
    try:
        return main(argv)
    except PacelineError as error:
        print(f"./run bench: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("./run bench: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
