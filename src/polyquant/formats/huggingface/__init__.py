"""Hugging Face folders: safetensors (one file or shards), pytorch_model.bin, packed BitNet, and their JSON files."""
