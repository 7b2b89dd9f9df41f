"""Python API of msModelSlim, with the names of the format's specification.

    from polyquant.msmodelslim import MSModelSlimWeightProcessor

For whole folders use `polyquant.convert(src, dst, to="msmodelslim")`.
"""

from polyquant.msmodelslim.processor import MSModelSlimWeightProcessor

__all__ = ["MSModelSlimWeightProcessor"]
