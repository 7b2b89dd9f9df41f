"""Trellis v2 and v3: folders of trellis-coded weights, in the documented form and in all dialects of Metal Marlin."""
