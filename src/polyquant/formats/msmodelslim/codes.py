"""Explanations of the findings about msModelSlim folders. The meaning of a code never changes."""

from __future__ import annotations

__all__ = ["CODES"]

CODES: dict[str, str] = {
    "ASC001": "config.json is missing. The weights can be read, but every runtime needs it to build the model, and "
    "without it the required storage of deq_scale is unknown. Copy it from the float model.",
    "ASC002": "config.json cannot be used: a broken link, not a regular file, or not a strict JSON object. Nothing can "
    "be loaded. Copy it from the float model.",
    "ASC003": "config.json still has the quantization_config of the model that was quantized. Loaders trust it and "
    "look for weights in that format. `polyquant repair` removes it.",
    "ASC004": "The weight files cannot be determined: there are none, several models are in one folder, or shard "
    "numbers are missing. Finish the download, or move each model to a separate folder.",
    "ASC005": "The index cannot be used: not strict JSON, or no weight_map from tensor names to file names. Nothing "
    "can be loaded through it. Download it again.",
    "ASC006": "weight_map or a link names a file outside the folder. A reader that follows it opens a file on your "
    "machine. Do not use this folder unless you trust its source.",
    "ASC007": "A shard that the index names is missing or cannot be opened. The model cannot be loaded. Finish the "
    "download.",
    "ASC008": "A shard is not a valid safetensors file: truncated, overlapping tensors, a header that is not strict "
    "JSON, bytes after the end. Nothing in it can be trusted. Copy it again and compare its size.",
    "ASC009": "Index and shards do not agree: a tensor is not in the shard that the index names, in two, or in none. "
    "Loaders fail or use either one. Index and shards come from different versions: copy both again, or `polyquant "
    "repair` the folder.",
    "ASC010": "There is no description (quant_model_description.json). Readers cannot determine the type of any "
    "tensor. `polyquant repair` writes it from dtypes and shapes.",
    "ASC011": "The description cannot be used: not strict JSON (the document's example has comments, which JSON does "
    "not allow), a duplicate key, or a type that is not a string. `polyquant repair` rewrites it.",
    "ASC012": "A tensor has no type in the description. Loaders that look it up stop with a KeyError. `polyquant "
    "repair` rewrites the description.",
    "ASC013": "The description names a tensor that no file contains. Loaders wait for it or stop with a KeyError. If "
    "the download is complete, `polyquant repair` rewrites the description.",
    "ASC014": "The description contradicts the tensors: parts of one layer have different types, or a float matrix is "
    "described as quantized. (The document gives the norm before a layer that layer's type: this is only a note.) "
    "Loaders choose the wrong kernel. Use `polyquant repair`.",
    "ASC015": "An unknown type. Its tensors are kept as stored; they can be copied, but not decoded or checked.",
    "ASC016": "A key about the whole model contradicts the tensors: model_quant_type that no layer has, or group_size "
    "that is not that of the scales. Loaders that choose kernels by it fail or decode wrongly. `polyquant repair` "
    "corrects it.",
    "ASC017": "There is no tokenizer. The weights are valid, but text cannot be processed. Copy the tokenizer files "
    "from the float model.",
    "ASC018": "A JSON file of the folder is broken: a dangling link, or not strict JSON. Copy it from the float model.",
    "ASC020": "A quantized layer lacks a tensor of its type: weight, weight_scale, weight_offset (W8A16, "
    "W8A8_DYNAMIC); weight, input_scale, input_offset, deq_scale, quant_bias (W8A8, W8A8S). It cannot be decoded. "
    "deq_scale and quant_bias can be recomputed by `polyquant repair` if weight_scale exists; for anything else "
    "quantize again.",
    "ASC021": "A tensor of a quantized layer has the wrong dtype or shape, or does not belong to that type. Loaders "
    "reject it or read garbage. The file was truncated by a broken program: quantize this layer again.",
    "ASC022": "The number of scales in a row does not divide the columns of the weight, so there is no valid group "
    "size. The layer cannot be decoded. Quantize it again with a group size that divides.",
    "ASC023": "A scale is NaN, infinite, zero or negative. The whole channel decodes to nonsense. In half precision a "
    "product of two small scales underflows to zero: quantize this layer again with float32 scales.",
    "ASC024": "weight_offset is not an integer, or outside the range of the codes (-128 to 127, for 4 bits -8 to 7). "
    "Hardware subtracts integers, so it computes other weights than polyquant decodes. Quantize this layer again.",
    "ASC025": "input_offset is not an integer from -128 to 127, or input_scale is not positive and finite. The "
    "hardware's kernel uses int8: other values are truncated. Calibrate this layer again.",
    "ASC026": "deq_scale is stored as int64 but is not a zero-extended float32. Kernels read the low half: garbage. "
    "`polyquant repair` recomputes it if weight_scale exists.",
    "ASC027": "deq_scale is not input_scale times weight_scale. Every output of these channels is off by that factor. "
    "`polyquant repair` recomputes it.",
    "ASC028": "quant_bias is not round(bias / deq_scale - input_offset * sum of the row's codes). Every output of "
    "these channels has a constant error: usually the bias or the correction for the offset was omitted. `polyquant "
    "repair` recomputes it.",
    "ASC029": "deq_scale has the wrong storage type for this model: float32 for bfloat16 models, int64 for all others. "
    "vLLM-Ascend and SGLang cast it when loading, so that scales become huge integers or zero. `polyquant repair` "
    "changes the storage.",
    "ASC030": "4-bit codes, one per byte, are outside -8 to 7: two codes are packed into each byte, which the "
    "description does not show (no version, no group_size). Every weight decodes wrongly. `polyquant repair` sets "
    "version.",
    "ASC031": "scale_bias is not 8 times the sum of the decoded row. The kernel's correction for its unsigned codes is "
    "wrong. Quantize this layer again.",
    "ASC040": "The 8-bit cache (C8) is incomplete: k and v of every layer need kv_cache_scale and kv_cache_offset. "
    "Loaders initialize missing ones with 1 and 0, which gives zeros or noise. Calibrate the cache again.",
    "ASC041": "kv_cache_scale or kv_cache_offset do not have one entry per channel of k and v. Loaders truncate or "
    "reject them. Calibrate the cache again.",
    "ASC042": "kv_cache_scale contains NaN, infinity, zero or negative values, or kv_cache_offset is not an integer "
    "from -128 to 127. The cached keys and values decode wrongly. Calibrate the cache again.",
    "ASC043": "kv_cache_type and the tensors disagree: it is C8 but there are no cache scales, or the reverse. In the "
    "latter case loaders ignore the scales. `polyquant repair` sets it from the tensors.",
    "ASC050": "A smoothed norm is incomplete: `.module.weight`, `.module.bias` and `.weight` belong together and have "
    "equal size. Loaders of the older layout fail. Download the folder again.",
    "ASC051": "`.module.weight` differs from `.weight`: the folder keeps the norm before smoothing for layers that "
    "stay float, as documented. The current tool writes the smoothed norm under both names; readers of only `.weight` "
    "compute smoothed layers with the wrong norm.",
    "ASC070": "The consumer reads quant_model_description.json, but this folder's description has a different name. "
    "The consumer reports that the model is not quantized, or treats it as float. `polyquant repair --dialect v1` "
    "renames it.",
    "ASC071": "A type for which this consumer has no kernel (for layers or experts). It rejects the model at launch. "
    "Quantize those layers to a supported type, e.g. w8a8.dynamic.",
    "ASC072": "A shape that this consumer does not support: it expects one scale per row as [N, 1] and deq_scale as "
    "[N]. Loading fails. Rewrite the folder per channel with `polyquant convert`.",
    "ASC073": "Weights with offsets (asymmetric). vLLM-Ascend passes weight_offset to a kernel that adds it instead of "
    "subtracting it, and its dynamic kernels ignore it: every weight is wrong. MindIE negates the offset itself; "
    "quantize symmetrically for the others.",
    "ASC074": "The consumer does not support deq_scale for models that are neither float16 nor bfloat16. Static layers "
    "cannot be loaded. Set torch_dtype of config.json to float16 and deq_scale as int64, or quantize from a "
    "half-precision model.",
    "ASC076": "The consumer fuses these layers (q, k and v; gate and up), but they have different types. vLLM-Ascend "
    "rejects the model; SGLang uses one type for all. Quantize or keep them together.",
    "ASC078": "config.json has a quantization_config: this consumer chooses its loader by it and never reads the "
    "description. `polyquant repair` removes it.",
    "ASC079": "The cache has offsets (asymmetric C8). vLLM-Ascend's decoding kernel gets only the scales: keys and "
    "values are shifted. Calibrate the cache symmetrically for it.",
    "ASC080": "The scales of an 8-bit cache (C8) are not used: vLLM-Ascend checks only kv_cache_type, SGLang has no "
    "int8 cache for this format. The model runs with a float cache, or loading fails at unknown tensors.",
    "ASC081": "norm.module.weight and norm.module.bias: this consumer's models have no such parameters and read "
    "`.weight` and `.bias`. Loading fails, or smoothed layers get the wrong norm. Write the folder in the dialect v1 "
    "with `polyquant convert --dialect v1`.",
    "ASC082": "The folder has safetensors files that are not part of the model. vLLM and SGLang load all of them and "
    "fail at unknown names. Move them away.",
    "ASC083": "config.json has no field `quantize`. Some versions of MindIE's model code choose kernels by it, and "
    "the tool writes it for some models "
    '("quantize": "w8a8_dynamic"). Add it if MindIE treats the model as float.',
    "ASC084": "MindIE's int8 cache is documented for float16 models with W8A8 or W8A16 weights only. Other "
    "combinations are rejected or untested.",
    "ASC085": "W8A8S weights are only ready for the compressor (W8A8SC). MindIE runs them after compression on the "
    "target machine; until then they are as large as W8A8.",
    "ASC086": "W4A8_DYNAMIC experts in groups. This consumer supports only one scale per channel. Quantize per "
    "channel.",
}
