"""Searches for the codes of whole tensors."""
