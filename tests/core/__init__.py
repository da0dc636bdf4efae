"""Tests of words and rules."""
