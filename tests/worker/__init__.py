"""Tests of what both tiers of workers share."""
