"""Support for quantized models in transformers.

load_model loads a GGUF file or a folder of any format and keeps its quantized weights packed:

    from polyquant.hf import load_model, load_tokenizer
    model, tokenizer = load_model("model.gguf"), load_tokenizer("model.gguf")

After this import, `from_pretrained` also loads Trellis v3 folders:

    import polyquant.hf
    from transformers import AutoModelForCausalLM
    model = AutoModelForCausalLM.from_pretrained("models/Model-Trellis-v3")
"""

from polyquant.integrations.transformers.config import TrellisConfig
from polyquant.integrations.transformers.linear import PackedLinear, TrellisLinear
from polyquant.integrations.transformers.load import load_trellis_model
from polyquant.integrations.transformers.load_model import load_model, load_tokenizer

__all__ = ["PackedLinear", "TrellisConfig", "TrellisLinear", "load_model", "load_tokenizer", "load_trellis_model"]
