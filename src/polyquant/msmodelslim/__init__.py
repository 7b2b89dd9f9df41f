"""The Python face of msModelSlim, with the names of the format's own document.

    from polyquant.msmodelslim import MSModelSlimWeightProcessor

A whole folder needs none of this: `polyquant.convert(src, dst, to="msmodelslim")` opens, converts and streams.
"""

from polyquant.msmodelslim.processor import MSModelSlimWeightProcessor

__all__ = ["MSModelSlimWeightProcessor"]
