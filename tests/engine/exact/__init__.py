"""Tests of exact mode."""
