"""Part of a substitute for vLLM."""
