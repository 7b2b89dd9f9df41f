"""Bytes and files: positioned reads, maps, safetensors, staging of output. Knows no names and no codecs."""
