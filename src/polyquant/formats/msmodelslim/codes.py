"""Finding codes of msModelSlim folders: what each means, what breaks, what to do. Codes are never given a second meaning."""

from __future__ import annotations

__all__ = ["CODES"]

CODES: dict[str, str] = {
    "ASC001": "config.json is missing. The weights can be read; every runtime needs it to build the model, and without it nothing says which "
    "storage deq_scale must have. Copy it from the float model.",
    "ASC002": "config.json cannot be used: a broken link, no regular file, or no strict JSON object. Nothing can be loaded. Copy it from the "
    "float model.",
    "ASC003": "config.json still has the quantization_config of the model that was quantized. Loaders believe it and look for weights in that "
    "format. `polyquant repair` removes it.",
    "ASC004": "Which files are the weights cannot be told: there are none, several models lie in one folder, or shards are missing from "
    "their numbers. Finish the download, or give each model a folder of its own.",
    "ASC005": "The index cannot be used: not strict JSON, or no weight_map from tensor names to file names. Nothing can be loaded through it. "
    "Download it again.",
    "ASC006": "weight_map or a link names a file outside the folder. A reader that follows it opens a file of your machine. Do not use this "
    "folder without asking who made it.",
    "ASC007": "A shard that the index names is missing or cannot be opened. The model cannot be loaded. Finish the download.",
    "ASC008": "A shard is no sound safetensors file: truncated, overlapping tensors, a header that is no strict JSON, bytes behind the end. "
    "Nothing in it can be trusted. Copy it again and compare its size.",
    "ASC009": "Index and shards do not agree: a tensor lies in another shard than the index says, in two, or in none. Loaders fail or take "
    "either. Index and shards come from different versions: copy both again, or `polyquant repair` the folder.",
    "ASC010": "There is no description (quant_model_description.json). No reader knows the type of any tensor. `polyquant repair` writes it "
    "from dtypes and shapes.",
    "ASC011": "The description cannot be used: no strict JSON (the document's example has comments, which JSON has not), the same key twice, or a "
    "type that is no string. `polyquant repair` writes it anew.",
    "ASC012": "A tensor has no type in the description. Loaders that look it up stop with a KeyError. `polyquant repair` writes the "
    "description anew.",
    "ASC013": "The description names a tensor that no file has. Loaders wait for it or stop with a KeyError. If the download is complete, "
    "`polyquant repair` writes the description anew.",
    "ASC014": "The description contradicts the tensors: parts of one layer have different types, or a float matrix is said to be quantized. (The "
    "document gives the norm before a layer that layer's type: that is only a note.) Loaders choose a wrong kernel. `polyquant repair`.",
    "ASC015": "A type that polyquant does not know. Its tensors are kept as stored and can be copied, not decoded or checked.",
    "ASC016": "A key about the whole model contradicts the tensors: model_quant_type that no layer has, or group_size that is not that of the "
    "scales. Loaders that build kernels from it fail or decode wrongly. `polyquant repair` writes the true one.",
    "ASC017": "There is no tokenizer. The weights are sound; text needs one. Copy the tokenizer's files from the float model.",
    "ASC018": "A JSON file beside the weights is broken: a link that leads nowhere, or no strict JSON. Copy it from the float model.",
    "ASC020": "A quantized layer lacks a tensor that its type needs: weight, weight_scale, weight_offset (W8A16, W8A8_DYNAMIC); weight, input_scale, "
    "input_offset, deq_scale, quant_bias (W8A8, W8A8S). It cannot be decoded. deq_scale and quant_bias can be recomputed by `polyquant "
    "repair` where weight_scale is there; anything else must come from the quantizer again.",
    "ASC021": "A tensor of a quantized layer has the wrong dtype or shape, or no place in that type. Loaders refuse it or read garbage. The "
    "file was cut by a broken program: quantize this layer again.",
    "ASC022": "The number of scales in a row does not divide the columns of the weight, so that no group size exists. Nothing can decode the layer. "
    "Quantize it again with a group size that divides.",
    "ASC023": "A scale is NaN, infinite, zero or negative. The whole channel decodes to nonsense. In half precision a product of two small scales "
    "falls to zero: quantize this layer again with float32 scales.",
    "ASC024": "weight_offset is no whole number, or outside the range of the codes (-128 to 127, for 4 bits -8 to 7). Hardware subtracts whole "
    "numbers; what decodes here is not what runs there. Quantize this layer again.",
    "ASC025": "input_offset is no whole number from -128 to 127, or input_scale no positive finite number. The hardware's kernel takes int8: "
    "other values are cut. Calibrate this layer again.",
    "ASC026": "deq_scale is stored as int64 and does not hold 32 bits, zero-extended, of a float32. Kernels read the low half: garbage. "
    "`polyquant repair` recomputes it where weight_scale is there.",
    "ASC027": "deq_scale is not input_scale times weight_scale. Every output of these channels is off by that factor. `polyquant repair` recomputes "
    "it.",
    "ASC028": "quant_bias is not round(bias / deq_scale - input_offset * sum of the row's codes). A constant error stands on every output of these "
    "channels: usually the bias was forgotten, or the offset's correction. `polyquant repair` recomputes it.",
    "ASC029": "deq_scale has the wrong storage for this model: float32 models of bfloat16, int64 all others. vLLM-Ascend and SGLang cast what "
    "they load, so that scales become huge integers or zero. `polyquant repair` changes the storage.",
    "ASC030": "4-bit codes of one a byte lie outside -8 to 7: two codes are packed into each byte, and nothing in the description says so "
    "(no version, no group_size). Every weight decodes wrongly. `polyquant repair` sets version.",
    "ASC031": "scale_bias is not 8 times the sum of the decoded row. The kernel's correction for its unsigned codes is wrong. Quantize this layer "
    "again.",
    "ASC040": "The 8-bit cache (C8) is incomplete: k and v of a layer each need kv_cache_scale and kv_cache_offset, and all layers of the model "
    "need them. Loaders start the missing ones with 1 and 0, which is silence or noise. Calibrate the cache again.",
    "ASC041": "kv_cache_scale or kv_cache_offset do not have one entry a channel of k and v. Loaders cut or refuse them. Calibrate the "
    "cache again.",
    "ASC042": "kv_cache_scale holds NaN, infinity, zero or negative numbers, or kv_cache_offset holds no whole number from -128 to 127. The cached "
    "keys and values decode wrongly. Calibrate the cache again.",
    "ASC043": "kv_cache_type and the tensors disagree: it says C8 and there are no scales of the cache, or the reverse. With the latter loaders ignore "
    "the scales. `polyquant repair` sets it by the tensors.",
    "ASC050": "A smoothed norm is incomplete: `.module.weight` and `.module.bias` belong together, beside `.weight`, all of one size. Loaders "
    "of the older layout stop. Take the folder from its source again.",
    "ASC051": "`.module.weight` differs from `.weight`: the folder keeps the norm of before smoothing for fallback layers, as the document has it. "
    "The current tool writes the smoothed norm under both names; readers of only `.weight` compute smoothed layers with the wrong norm.",
    "ASC070": "The consumer reads quant_model_description.json and this folder's description has another name. It says that the model is not "
    "quantized, or takes it for float. `polyquant repair --dialect v1` gives it that name.",
    "ASC071": "A type that this consumer has no kernel for at this place (layer or expert). It refuses the model at launch. Quantize those "
    "layers to a type that it has, e.g. w8a8.dynamic.",
    "ASC072": "A shape that this consumer has no room for: it takes one scale a row as [N, 1] and deq_scale as [N]. Loading stops. Write the "
    "folder anew per channel with `polyquant convert`.",
    "ASC073": "Weights with offsets (asymmetric). vLLM-Ascend hands weight_offset to a kernel that adds it, where the format subtracts it, and its "
    "dynamic kernels leave it out: every weight is wrong. MindIE negates the offset itself; quantize symmetrically for the others.",
    "ASC074": "The consumer has no deq_scale for models that are neither float16 nor bfloat16. Static layers cannot be loaded. Set torch_dtype of "
    "config.json to float16 and deq_scale as int64, or quantize from a half-precision model.",
    "ASC076": "The consumer joins these layers into one (q, k and v; gate and up), and they have different types. vLLM-Ascend refuses the model; "
    "SGLang takes one type for all. Quantize or keep them together.",
    "ASC078": "config.json has a quantization_config: this consumer chooses its loader by that and never looks at the description. "
    "`polyquant repair` removes it.",
    "ASC079": "The cache has offsets (asymmetric C8). vLLM-Ascend's decoding kernel gets the scales only: keys and values come back shifted. "
    "Calibrate the cache symmetrically for it.",
    "ASC080": "The scales of an 8-bit cache (C8) are not used: vLLM-Ascend looks at kv_cache_type only, SGLang has no int8 cache for this format. The "
    "model runs with a float cache, or stops at tensors that it does not know.",
    "ASC081": "norm.module.weight and norm.module.bias: this consumer's models have no such parameters and read `.weight` and `.bias`. Loading "
    "stops, or smoothed layers get the wrong norm. Write the folder in the dialect v1 with `polyquant convert --dialect v1`.",
    "ASC082": "The folder has safetensors files that are none of the model's. vLLM and SGLang load every one of them and stop at names that they do "
    "not know. Move them away.",
    "ASC083": "config.json has no field `quantize`. Versions of MindIE's model code choose their kernels by it, and the tool writes it for some models "
    '("quantize": "w8a8_dynamic"). Add it if MindIE takes the model for float.',
    "ASC084": "MindIE's int8 cache is documented for float16 models with W8A8 or W8A16 weights only. Other combinations are refused or untested.",
    "ASC085": "W8A8S weights are only ready for the compressor (W8A8SC). MindIE runs them after compression on the target machine; until then "
    "they are as large as W8A8.",
    "ASC086": "W4A8_DYNAMIC experts in groups. This consumer takes one scale a channel only. Quantize per channel.",
}  # fmt: skip
