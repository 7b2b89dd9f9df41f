"""msModelSlim (Ascend): int8 and int4 weights with a description of every tensor's type, in three dialects."""
