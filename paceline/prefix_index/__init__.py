"""The table of who holds which prefix."""
