"""Checks that built-in and outside packages share: each raises AssertionError. They need no test framework."""
