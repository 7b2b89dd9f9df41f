"""Codecs, one file per family. A codec works on arrays and never touches files."""
