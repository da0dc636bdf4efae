"""Tests of the prefill tier."""
