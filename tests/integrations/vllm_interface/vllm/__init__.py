"""Substitute for vLLM: the classes of release 0.33 that the plugin uses, with their signatures, without their work."""
