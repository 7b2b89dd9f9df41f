"""Python API of Trellis v2 and v3, with the names of the format's specification.

    from polyquant.trellis.loader import TrellisModelLoader
    from polyquant.trellis.converter import convert_to_v3
    from polyquant.trellis.quantizer import TrellisQuantizer

These are thin wrappers of `polyquant.open`, `convert` and `quantize`.
"""
