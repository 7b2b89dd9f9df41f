"""Digests of a model's weights and files, and their check."""
