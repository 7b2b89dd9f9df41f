"""Explanations of the findings about Trellis folders. The meaning of a code never changes."""

from __future__ import annotations

__all__ = ["CODES"]

CODES: dict[str, str] = {
    "TRL001": "config.json is missing. The weights can be read, but transformers and every runtime need it to build "
    "the model. Copy it from the float model.",
    "TRL002": "config.json cannot be used: a broken link, not a regular file, or not a strict JSON object. Nothing can "
    "be loaded. Copy it from the float model.",
    "TRL003": "config.json lacks model_type or architectures. AutoModel of transformers cannot determine the model "
    "class. Copy the file from the float model.",
    "TRL004": "There is no tokenizer. The weights are valid, but text cannot be processed. Copy the tokenizer files "
    "from the float model.",
    "TRL005": "A JSON file of the folder is broken: a dangling link, or not strict JSON. Copy it from the float model.",
    "TRL006": "config.json and the tensors contradict each other: a tensor that the architecture needs is missing, has "
    "a different size, or does not belong to it. Loaders fail, or leave layers at random values. Take config.json and "
    "tensors from the same version of the model.",
    "TRL007": "config.json does not declare the quantization. transformers does not know that the layers are packed: "
    "it finds no weights under the names that it expects and initializes the layers randomly. Load the folder with "
    "polyquant.hf.load_trellis_model, or rewrite it with `polyquant convert`, which declares it.",
    "TRL008": "The entry quantization_config of config.json contradicts quantization_config.json or the tensors. "
    "Readers that trust the entry plan or report the wrong bits. `polyquant convert` writes a correct one.",
    "TRL009": "The number of a v2 layer folder, layer_idx in its index, and the names of its tensors contradict each "
    "other. A reader that uses one of them loads a layer in the place of another. Rename the folder, or quantize "
    "the layer again.",
    "TRL010": "The index cannot be used: not strict JSON, or no weight_map from tensor names to file names. Nothing "
    "can be loaded through it. Download it again, or rewrite the folder with `polyquant convert`.",
    "TRL011": "weight_map or a link names a file outside the folder. A reader that follows it opens a file on your "
    "machine. Do not use this folder unless you trust its source.",
    "TRL012": "A shard is missing that the index or the numbering of the other shards requires. The model cannot be "
    "loaded. Finish the download.",
    "TRL013": "The index names a shard for a tensor that the shard does not contain. Loaders fail. Index and shards "
    "come from different versions: download both again.",
    "TRL014": "Orphaned tensor: it is in a shard, but weight_map does not name it or names another shard. Loaders that "
    "follow the index ignore it. Rewrite the folder to make it consistent.",
    "TRL015": "A safetensors file that the index does not name. It is not loaded; it may be left from another version. "
    "Remove it.",
    "TRL016": "metadata.total_size of the index is not the sum of the tensors' bytes. Loaders that use it for memory "
    "planning get it wrong; Metal Marlin's migration script writes a meaningless value. `polyquant convert` writes the "
    "correct one.",
    "TRL017": "A shard cannot be opened: a dangling or circular link, a pipe, a folder, or no permission. Copy the "
    "file here.",
    "TRL018": "A shard is not a valid safetensors file: truncated, overlapping tensors, a header that is not strict "
    "JSON, bytes after the end. Nothing in it can be trusted. Download it again and compare its size.",
    "TRL019": "There are no weights: no index, no shards, no layer folders with safetensors files. Check the path, or "
    "finish the download.",
    "TRL020": "A quantized weight lacks a component: it needs indices, scales, su and sv (and lut with that codebook). "
    "It cannot be decoded. The file was written or truncated by a broken program: download it again.",
    "TRL021": "A component has the wrong dtype: indices are U8, all others F32. Readers reject it or decode garbage. "
    "Rewrite the file.",
    "TRL022": "A component has the wrong size: K and N are the lengths of su and sv, scales are [groups, N], and "
    "indices have 32 x bits bytes for each of ceil(K / 16) x ceil(N / 16) tiles, with no header byte, one, or one per "
    "tile: the same in all weights of a folder with flat indices. The tensor is truncated or belongs to another "
    "weight.",
    "TRL023": "Bits outside 2 to 8 (1 to 8 for codes that come from EXL3). No packing exists for them. The file is "
    "broken, or in a different format.",
    "TRL024": "The header byte or the metadata state a number of bits that does not match the size of the indices. A "
    "reader that trusts one of them decodes garbage. Find the file that is from another version.",
    "TRL025": "The header bytes of one tensor's tiles differ. A tile was damaged, or the tensor was combined from "
    "several. Download it again.",
    "TRL026": "Scales or signs contain NaN or infinity. Every weight of that channel decodes to NaN and spreads to "
    "every later token. The quantizer diverged: quantize this tensor again.",
    "TRL027": "A sign vector (su or sv) contains zeros. The inputs or outputs at these positions contribute nothing, "
    "so that part of the matrix is lost. No known writer makes them; the tensor is damaged.",
    "TRL028": "Two tensors have the same name: in two files, once with dots and once with __, or once quantized and "
    "once plain. Readers use either one. Remove the wrong one.",
    "TRL030": "quantization_config.json is missing. Files of Metal Marlin do not need it: they are read by their "
    "sizes. Codes with a codebook cannot be decoded without it, and such a folder does not open. Finish the download, "
    "or convert the folder.",
    "TRL031": "The metadata (quantization_config.json, quantization_index.json, trellis_index.json or a layer's "
    "index.json) cannot be used: not strict JSON, or members of the wrong type. Download it again.",
    "TRL032": "quantization_config.json lacks a documented field, or has an invalid one. polyquant needs only the "
    "codebook; other readers may fail. `polyquant convert` writes all of them.",
    "TRL033": "Metadata and tensors do not name the same weights. A layer may be missing, or files of two versions are "
    "mixed. Readers that iterate over the metadata fail at the first missing one.",
    "TRL034": "The shape in the metadata is not that of the components: neither [K, N] nor [N, K] of su and sv, or "
    "against the shape of the tiles. Metadata and shards come from different versions.",
    "TRL035": "The bits in layer_allocation are not those of the tensors. It is only informative, and out of date.",
    "TRL036": "Wrong figures in the metadata: bytes without scales and signs, ratios, average bits per weight. Nothing "
    "breaks, but do not compare models by them. `polyquant inspect` shows the correct ones.",
    "TRL037": "The codebook, its window, its tile order or its Hadamard blocks are unknown, or do not fit the tensor. "
    "The codes cannot be decoded. Perhaps the file needs a newer polyquant.",
    "TRL040": "Tensors are named with __ instead of dots in v3 shards, as Metal Marlin's own writers do. Readers that "
    "follow the document find no component. `polyquant convert` writes dots.",
    "TRL041": "metadata.format of the index is trellis_v2 (or something else) for v3 shards. A reader that trusts it "
    "looks for layer folders. `polyquant convert` writes trellis_v3.",
    "TRL042": "Embeddings, norms and other float weights are in a separate file that weight_map does not name. Loaders "
    "that follow the index initialize them randomly. `polyquant convert` puts them into the shards.",
    "TRL043": "There is no metadata for bits and shapes. Both follow from the sizes, except the axes of square "
    "weights, which are assumed to be Metal Marlin's. Metal Marlin's own loader finds nothing here. `polyquant "
    "convert` writes metadata.",
    "TRL044": "Indices start with header bytes: one per tensor, or one per tile. The document describes forms with and "
    "without them. Readers that do not expect them are off by one byte. `polyquant convert` writes none.",
    "TRL045": "Tiles and shapes are [N, K], outputs first, as in Metal Marlin's code; the document has [K, N]. Readers "
    "that follow the document transpose every weight. `polyquant convert` writes the document's axes.",
    "TRL046": "The 16 outputs of a tile have different scales. Metal Marlin quantized the tile with their mean and "
    "decodes each output with its own, so these weights decode worse than they were quantized. `polyquant convert "
    "--repair` writes the intended weights.",
    "TRL047": "The weights were rotated by a Hadamard transform before quantization, and Metal Marlin's decoder does "
    "not invert it: decoded this way they are noise. `polyquant convert --repair` writes the intended weights.",
    "TRL048": "Square weights whose signs Metal Marlin's decoder swaps: it applies su to the outputs and sv to the "
    "inputs if both are equally long. polyquant decodes as it does. `polyquant convert --repair` writes the intended "
    "weights.",
    "TRL049": "The index has the key ' quantization' with a leading space, as the document's example does. Readers "
    "that look for 'quantization' do not find it. It is only informative.",
    "TRL050": "Some weights do not show whether they are [K, N] or [N, K]: square ones, and any without metadata. They "
    "were assumed to be like the others of the folder, or from the schema of the metadata. If the model generates "
    "nonsense, open it with the other axes (--axes kn or nk).",
}
