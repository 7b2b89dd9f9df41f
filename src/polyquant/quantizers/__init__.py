"""Algorithms that choose codes over whole tensors."""
