"""Figures about weights, and how they are shown."""
