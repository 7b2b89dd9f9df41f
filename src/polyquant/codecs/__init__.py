"""One file per family of codecs. A codec knows arrays, never files."""
