"""Bytes and files: positioned reads, memory maps, safetensors, staged output. Independent of names and codecs."""
