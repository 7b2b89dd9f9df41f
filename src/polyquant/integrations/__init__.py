"""Integrations with other programs; each imports its host on first use."""
