"""A real cluster under load and under faults, seeded: whether any answer changes, or is lost, and how long recovery takes."""
