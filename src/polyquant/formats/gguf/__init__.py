"""GGUF, the format of llama.cpp: everything reads from here.

Byte diagram and sources: header.py (the file), values.py (metadata), dialect.py (type numbers), codes.py (what findings mean).
"""
