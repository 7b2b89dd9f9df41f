"""GGUF, the format of llama.cpp and programs derived from it.

Byte diagram and sources: header.py (the file), values.py (metadata), dialect.py (type numbers), codes.py (findings).
"""
