"""Stores that name files by digest: Ollama's model store and OCI image layouts. Nothing here knows a model format."""
