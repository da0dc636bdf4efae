"""Tests of the launcher and of the run script."""
