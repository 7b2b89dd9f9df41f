"""The meaning of names: architectures, configurations, tokenizers."""
