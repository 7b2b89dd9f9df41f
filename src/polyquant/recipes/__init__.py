"""Recipes: named mixes and rules that choose each tensor's codec."""
