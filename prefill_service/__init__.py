"""The prefill worker: computes prompts' KV, chunk by chunk."""
