"""Conversion: from a recipe to a plan, from a plan to files."""
