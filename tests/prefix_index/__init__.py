"""Tests of the prefix table."""
