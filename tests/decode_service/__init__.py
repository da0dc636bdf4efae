"""Tests of the decode tier."""
