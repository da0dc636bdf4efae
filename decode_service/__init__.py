"""The decode tier's process."""
