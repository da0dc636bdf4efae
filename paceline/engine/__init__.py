"""The engine: decides what runs (no torch) and runs it (torch)."""
