"""Tests of the hand-over."""
