"""msModelSlim (Ascend): folders of int8 and int4 weights with a description of the type of every tensor, in three dialects."""
