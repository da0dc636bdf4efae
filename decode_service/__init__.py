"""The decode worker: pulls KV and generates by continuous batching."""
