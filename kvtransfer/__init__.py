"""The hand-over: moves computed KV blocks from the worker that has them to the worker that needs them."""
