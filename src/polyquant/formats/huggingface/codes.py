"""Explanations of the findings about Hugging Face folders. The meaning of a code never changes."""

from __future__ import annotations

__all__ = ["CODES"]

CODES: dict[str, str] = {
    "HF001": "The safetensors header size is wrong: the file is shorter than its first 8 bytes claim, or they claim "
    "more than 14,000,000 bytes. No reader opens the file. It is truncated, or not a safetensors file: download it "
    "again.",
    "HF002": "The safetensors header is not strict JSON: invalid UTF-8, a duplicate key, nesting deeper than 64, an "
    "invalid number. Readers reject it or, with a duplicate key, see different tensors. Rewrite the file with its own "
    "tool.",
    "HF003": "A tensor's description is malformed: dtype, shape or data_offsets are missing or of the wrong type. "
    "Readers reject the file. Rewrite it.",
    "HF004": "A tensor's byte range does not equal shape x dtype. Readers reject the file, or would read other bytes. "
    "Rewrite it; do not trust the other tensors.",
    "HF005": "Tensors overlap or leave gaps. The reference reader rejects the file; gaps can hide data. Rewrite it.",
    "HF006": "A tensor ends after the file does: the file is truncated. Download it again and compare its size.",
    "HF007": "There are bytes after the last tensor. The reference reader rejects the file. Two files may have been "
    "concatenated, or a header edited: rewrite it.",
    "HF008": "A dtype that polyquant cannot decode. The tensor is treated as bytes and can be copied to another "
    "folder, but not converted or compared.",
    "HF009": "__metadata__ does not map strings to strings. The reference reader rejects the file. Rewrite it.",
    "HF010": "The index cannot be used: not strict JSON, or no weight_map from tensor names to file names. Nothing can "
    "be loaded through it. Download it again, or rewrite the folder.",
    "HF011": "weight_map names a file outside the folder. A reader that follows it opens a file on your machine. Do "
    "not use this folder unless you trust its source.",
    "HF012": "A shard that the index names is missing. The model cannot be loaded. Finish the download.",
    "HF013": "The index names a shard for a tensor that the shard does not contain. Loaders fail or initialize it "
    "randomly. Index and shards come from different versions: download both again.",
    "HF014": "A tensor in a shard is not in weight_map, or not for that shard. Some loaders use it, others do not. "
    "Rewrite the folder to make it consistent.",
    "HF015": "A safetensors file that the index does not name. It is not loaded; it may be left from another version. "
    "Remove it, or add it to the index.",
    "HF016": "metadata.total_size of the index is not the sum of the tensors' bytes. Loaders that use it for memory "
    "planning get it wrong. Rewrite the folder.",
    "HF018": "Both a single weight file and an index exist. Loaders use the single file and ignore the shards. Remove "
    "the wrong one.",
    "HF019": "There are no weights: neither model.safetensors, pytorch_model.bin nor an index of shards; or several "
    "files without an index, or with missing shards. Finish the download.",
    "HF020": "config.json is missing. The weights can be read, but the architecture is unknown: they cannot be run or "
    "translated to another format. Copy it from the original model.",
    "HF021": "config.json cannot be read as strict JSON. Download it again.",
    "HF022": "config.json has neither model_type nor architectures. Weights can only be converted under their own "
    "names. Copy config.json from the original model.",
    "HF023": "config.json ties the output head to the embedding, but the head is also stored. If they are equal this "
    "only wastes space; if not, loaders drop the stored head and the model changes. Set tie_word_embeddings to false "
    "to use the head.",
    "HF024": "config.json does not tie the output head, and no head is stored. Loaders initialize it randomly. Set "
    "tie_word_embeddings to true, or add lm_head.weight.",
    "HF025": "Tensors contradict config.json (layers, vocabulary, hidden size). Loaders fail or leave layers random. "
    "config.json belongs to another model, or shards are missing.",
    "HF030": "There is no tokenizer (tokenizer.json, tokenizer.model, vocab.json with merges.txt, or vocab.txt). The "
    "model cannot process text, and neither can a converted file. Copy it from the original model.",
    "HF031": "A tokenizer file or another JSON file of the folder cannot be read as strict JSON. Download it again.",
    "HF040": "A symbolic link to outside the folder (links into the blobs of the same hub cache are fine). Following "
    "it opens a file on your machine. Copy the file into the folder.",
    "HF041": "A file of the model is not a readable regular file. Replace it.",
    "HF050": "pytorch_model.bin asks for more than a state dict needs, or is broken. It may run code when loaded with "
    "other tools: do not load it. polyquant did not execute anything.",
    "HF051": "Weights are stored as pickle. polyquant reads them without executing anything; other tools may not. "
    "Convert to safetensors.",
    "HF052": "pytorch_model.bin seems valid, but is of an unsupported kind (from before torch 1.6, big-endian, or "
    "containing more than tensors). Save the state dict again with a newer torch, preferably as safetensors.",
    "HF060": "config.json declares packed BitNet, but a packed weight has no usable weight_scale: missing, not one "
    "float, not finite or zero. The layer decodes to nonsense. Convert the model again from its master weights.",
    "HF061": "config.json names a quantization method that polyquant does not decode. Its packed integers, or floats "
    "without their scales, look like weights but are not: `inspect` shows them in their stored layout, and everything "
    "else rejects the folder. Start from the float model, or dequantize it with the method's own tool. As a warning: "
    "no weight uses the method that config.json names.",
    "HF062": "An EXL3 weight lacks a tensor (trellis, suh, svh), or their shapes are inconsistent: I16 [K / 16, N / "
    "16, 16 x bits], F16 [K] and F16 [N], K and N multiples of 128. The layer cannot be decoded. Download the file "
    "again.",
    "HF063": "A weight of a quantized checkpoint (GPTQ, AWQ, compressed-tensors, FP8, bitsandbytes, HQQ, torchao, "
    "Quark, ChatGLM) lacks a tensor, or its "
    "tensors are inconsistent: codes, zero points and scales must agree on rows, columns and groups. The layer cannot "
    "be decoded. Finish the download, or quantize again (an old export of msModelSlim truncates qzeros if the rows are "
    "not a multiple of 32).",
    "HF064": "Scales of a quantized weight contain NaN or infinity. The layer decodes to nonsense and affects every "
    "later token. Quantize again.",
    "HF065": "Tensors are quantized codes (integers instead of weights, or 8-bit floats with scales), but config.json "
    "does not describe the quantization. Without the description they cannot be decoded: `inspect` shows them in their "
    "stored layout, and everything else rejects them. Often a key of config.json was lost, or one file of a folder was "
    "opened alone: copy config.json from the source, or open the folder.",
}
