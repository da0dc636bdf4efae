"""Ways to move blocks from one process to another."""
