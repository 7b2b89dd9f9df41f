"""Tokenizers: reading their files, writing them, and encoding text."""
