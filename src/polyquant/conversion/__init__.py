"""Conversions: a recipe becomes a plan, a plan becomes files."""
