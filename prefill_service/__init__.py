"""The prefill tier's process."""
