"""The Python face of Trellis v2 and v3, with the names of the format's own document.

    from polyquant.trellis.loader import TrellisModelLoader
    from polyquant.trellis.converter import convert_to_v3
    from polyquant.trellis.quantizer import TrellisQuantizer

Nothing is read or written here: these are `polyquant.open`, `convert` and `quantize` under other names.
"""
