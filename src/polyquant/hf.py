"""Support for Trellis v3 folders in transformers: after this import, `from_pretrained` loads them with packed weights.

import polyquant.hf
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained("models/Model-Trellis-v3")
"""

from polyquant.integrations.transformers.config import TrellisConfig
from polyquant.integrations.transformers.linear import TrellisLinear
from polyquant.integrations.transformers.load import load_trellis_model

__all__ = ["TrellisConfig", "TrellisLinear", "load_trellis_model"]
