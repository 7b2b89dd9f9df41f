"""Finding codes of Trellis folders: what each means, what breaks, what to do. Codes are never given a second meaning."""

from __future__ import annotations

__all__ = ["CODES"]

CODES: dict[str, str] = {
    "TRL001": "config.json is missing. The weights can be read; transformers and every runtime need it to build the model. Take it from the "
    "float model.",
    "TRL002": "config.json cannot be used: a broken link, no regular file, or no strict JSON object. Nothing can be loaded. Take it from the "
    "float model.",
    "TRL003": "config.json lacks model_type or architectures. AutoModel of transformers cannot tell which model to build. Take the file from "
    "the float model.",
    "TRL004": "There is no tokenizer. The weights are sound; text needs one. Copy the tokenizer's files from the float model.",
    "TRL005": "A JSON file beside the weights is broken: a link that leads nowhere, or no strict JSON. Copy it from the float model.",
    "TRL006": "config.json and the tensors contradict each other: a tensor that its architecture needs is missing, has another size, or has no place in it. "
    "Loaders fail or leave layers at random values. Take config.json and tensors from the same version of the model.",
    "TRL007": "config.json does not announce the quantization. transformers does not know that the layers are packed: it finds no weights under the names "
    "that it expects and fills the layers with random values. Load the folder with polyquant.hf.load_trellis_model, or write it again with "
    "`polyquant convert`, which announces it.",
    "TRL008": "The entry quantization_config of config.json contradicts quantization_config.json, or the tensors. Readers that trust the entry plan or "
    "report wrong bits. `polyquant convert` writes a true one.",
    "TRL010": "The index cannot be used: not strict JSON, or no weight_map from tensor names to file names. Nothing can be loaded through it. "
    "Download it again, or write the folder anew with `polyquant convert`.",
    "TRL011": "weight_map or a link names a file outside the folder. A reader that follows it opens a file of your machine. Do not use this "
    "folder without asking who made it.",
    "TRL012": "A shard is missing that the index, or the numbers in the other names, promise. The model cannot be loaded. Finish the download.",
    "TRL013": "The index names a shard for a tensor, and the tensor is not there. Loaders fail. Index and shards come from different versions: "
    "download both again.",
    "TRL014": "Orphaned tensor: it lies in a shard, and weight_map does not name it or names another shard. Loaders that follow the index "
    "do not see it. Write the folder anew to get one truth.",
    "TRL015": "A safetensors file that nothing names. It is not loaded; it may be left over from another version. Remove it.",
    "TRL016": "metadata.total_size of the index is not the sum of the tensors' bytes. Loaders that plan memory with it plan wrongly; Metal "
    "Marlin's migration script writes nonsense there. `polyquant convert` writes the true number.",
    "TRL017": "A shard cannot be opened: a link that leads nowhere or in a circle, a pipe, a folder, or no permission. Copy the file here.",
    "TRL018": "A shard is no sound safetensors file: truncated, overlapping tensors, a header that is no strict JSON, bytes behind the end. "
    "Nothing in it can be trusted. Download it again and compare its size.",
    "TRL019": "There are no weights: no index, no shards, no layer folders with safetensors files. Check the path, or finish the download.",
    "TRL020": "A quantized weight lacks a component: it needs indices, scales, su and sv (and lut with that codebook). It cannot be decoded. "
    "The file was written or cut by a broken program: take it from its source again.",
    "TRL021": "A component has the wrong dtype: indices are U8, all others F32. Readers refuse it or decode garbage. Write the file again.",
    "TRL022": "A component does not have the size that the arithmetic asks for: K and N are the lengths of su and sv, scales are [groups, N], "
    "and indices hold 32 x bits bytes for each of ceil(K / 16) x ceil(N / 16) tiles, with no header byte, one, or one a tile: the same "
    "in all weights of a folder whose indices are flat. The tensor is truncated or belongs to another weight.",
    "TRL023": "Bits outside 2 to 8 (1 to 8 for codes that come from EXL3). No packing exists for them. The file is broken, or of another format.",
    "TRL024": "The header byte, or the metadata, say another number of bits than the size of the indices allows. A reader that trusts one of "
    "them decodes garbage. Find out which file is from another version.",
    "TRL025": "The header bytes of one tensor's tiles differ. A tile was damaged, or the tensor put together from several. Take it from "
    "its source again.",
    "TRL026": "Scales or signs hold NaN or infinity. Every weight of that channel decodes to NaN and spreads to every later token. The "
    "quantizer diverged: quantize this tensor again.",
    "TRL028": "One name stands for two tensors: in two files, once with dots and once with __, or once quantized and once plain. Readers "
    "take either. Remove the one that is not meant.",
    "TRL030": "quantization_config.json is missing. Files of Metal Marlin can do without: they are read by their sizes. Codes with a codebook "
    "have no meaning without it, and such a folder does not open. Finish the download, or convert the folder.",
    "TRL031": "The metadata (quantization_config.json, quantization_index.json, trellis_index.json or a layer's index.json) cannot be used: no "
    "strict JSON, or members of the wrong type. Download it again.",
    "TRL032": "quantization_config.json lacks a field that the document lists, or holds an impossible one. Our reader needs only the "
    "codebook; other readers may stop. `polyquant convert` writes all of them.",
    "TRL033": "Metadata and tensors do not name the same weights. A layer may be missing, or files of two versions are mixed. Readers that walk "
    "the metadata fail at the first missing one.",
    "TRL034": "The shape in the metadata is not that of the components: neither [K, N] nor [N, K] of su and sv, or against the shape of the tiles. "
    "Metadata and shards come from different versions.",
    "TRL035": "layer_allocation says other bits than the tensors have. Only people read it; it is out of date.",
    "TRL036": "Figures in the metadata that are not true: bytes that leave out scales and signs, ratios, average bits per weight. Nothing "
    "breaks; do not compare models by them. `polyquant inspect` shows the true ones.",
    "TRL037": "The codebook, its window, its tile order or its Hadamard blocks are none that exist, or do not fit the tensor. The codes cannot "
    "be decoded. Perhaps the file needs a newer polyquant.",
    "TRL040": "Tensors are named with __ for dots inside v3 shards, as Metal Marlin's own writers do. Readers that follow the document find "
    "no component. `polyquant convert` writes dots.",
    "TRL041": "metadata.format of the index says trellis_v2 (or something else) over v3 shards. A reader that trusts it looks for layer folders. "
    "`polyquant convert` writes trellis_v3.",
    "TRL042": "Embeddings, norms and other float weights lie in a file of their own that weight_map does not name. Loaders that follow the index "
    "start with random numbers there. `polyquant convert` puts them into the shards.",
    "TRL043": "No metadata say the bits and shapes. Both follow from the sizes, except the axes of square weights, which are taken as "
    "Metal Marlin's. Metal Marlin's own loader finds nothing here. `polyquant convert` writes metadata.",
    "TRL044": "Indices begin with header bytes: one a tensor, or one a tile. The document has both this and a form without. Readers that do "
    "not expect them are off by one byte. `polyquant convert` writes none.",
    "TRL045": "Tiles and shapes are [N, K], outputs first, as in Metal Marlin's code; the document has [K, N]. Readers that follow the document "
    "transpose every weight. `polyquant convert` writes the document's axes.",
    "TRL046": "The 16 outputs of a tile have different scales. Metal Marlin quantized the tile with their mean and decodes each output with its "
    "own, so these weights decode worse than they were quantized. `polyquant convert --repair` writes what was meant.",
    "TRL047": "The weights were rotated by a Hadamard transform before quantization, and Metal Marlin's decoder never turns them back: as "
    "they are read they are noise. `polyquant convert --repair` writes what was meant.",
    "TRL048": "Square weights whose signs Metal Marlin's decoder swaps: it takes su for the outputs and sv for the inputs if both are equally "
    "long. We decode as it does. `polyquant convert --repair` writes what was meant.",
    "TRL049": "The index has the key ' quantization' with a leading space, as the document's example does. Readers that look for 'quantization' find "
    "nothing. Only people read it.",
    "TRL050": "Some weights do not show whether they are [K, N] or [N, K]: square ones, and any without metadata. They were taken like the others of the folder, or by the schema "
    "of the metadata. If the model talks nonsense, open it with the other axes (--axes kn or nk).",
}  # fmt: skip
