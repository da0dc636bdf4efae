"""Load generators and micro-benchmarks."""
