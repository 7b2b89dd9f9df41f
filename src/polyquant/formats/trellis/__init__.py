"""Trellis v2 and v3: folders of trellis-coded weights, in the document's form and in every dialect of Metal Marlin."""
