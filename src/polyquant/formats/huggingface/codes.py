"""Finding codes of Hugging Face folders: what each means, what breaks, what to do. Codes are never given a second meaning."""

from __future__ import annotations

__all__ = ["CODES"]

CODES: dict[str, str] = {
    "HF001": "The safetensors header does not fit: the file is shorter than its first 8 bytes claim, or claims more than "
    "14,000,000 bytes. No reader opens the file. It is truncated, or no safetensors file: download it again.",
    "HF002": "The safetensors header is not strict JSON: invalid UTF-8, a key twice, nesting deeper than 64, a number that is "
    "none. Readers refuse it or, with a key twice, see different tensors. Write the file again with its own tool.",
    "HF003": "A tensor's description is malformed: dtype, shape or data_offsets are missing or of the wrong type. Readers refuse "
    "the file. Write it again.",
    "HF004": "A tensor's byte range does not equal shape x dtype. Readers refuse the file, or would read foreign bytes. Write it "
    "again; do not trust the other tensors.",
    "HF005": "Tensors overlap or leave holes. The reference reader refuses the file; holes can hide data. Write it again.",
    "HF006": "A tensor ends after the file does: the file is truncated. Download it again and compare its size.",
    "HF007": "There are bytes after the last tensor. The reference reader refuses the file. Two files may have been joined, or a "
    "header edited: write it again.",
    "HF008": "A dtype that polyquant cannot decode. The tensor is carried as bytes and can be copied into another folder, but not "
    "converted or compared.",
    "HF009": "__metadata__ does not map strings to strings. The reference reader refuses the file. Write it again.",
    "HF010": "The index cannot be used: not strict JSON, or no weight_map from tensor names to file names. Nothing can be loaded "
    "through it. Download it again, or write the folder anew.",
    "HF011": "weight_map names a file outside the folder. A reader that follows it opens a file of your machine. Do not use this "
    "folder without asking who made it.",
    "HF012": "A shard that the index names is missing. The model cannot be loaded. Finish the download.",
    "HF013": "The index names a shard for a tensor, and the tensor is not there. Loaders fail or start with random numbers. "
    "Index and shards come from different versions: download both again.",
    "HF014": "A tensor in a shard is not in weight_map, or not for that shard. Some loaders use it, others do not. Write the "
    "folder anew to get one truth.",
    "HF015": "A safetensors file that no index names. It is not loaded; it may be left over from another version. Remove it, or "
    "add it to the index.",
    "HF016": "metadata.total_size of the index is not the sum of the tensors' bytes. Loaders that plan memory with it plan "
    "wrongly. Write the folder anew.",
    "HF018": "A single weight file and an index lie side by side. Loaders take the single file; the shards are ignored. Remove "
    "the one that is not meant.",
    "HF019": "There are no weights: neither model.safetensors, pytorch_model.bin nor an index of shards; or several files "
    "without an index, or with shards missing from their row. Finish the download.",
    "HF020": "config.json is missing. The weights can be read, but nothing says what model they are: they cannot be run or "
    "converted with their meaning. Copy it from the original model.",
    "HF021": "config.json cannot be read as strict JSON. Download it again.",
    "HF022": "config.json says neither model_type nor architectures. Weights convert under their own names only. Copy "
    "config.json from the original model.",
    "HF023": "config.json ties the output head to the embedding, and the head is stored too. If they are equal it costs only "
    "space; if not, loaders drop the stored head and the model changes. Set tie_word_embeddings to false if the head is meant.",
    "HF024": "config.json does not tie the output head, and no head is stored. Loaders start it with random numbers. Set "
    "tie_word_embeddings to true, or add lm_head.weight.",
    "HF025": "Tensors contradict config.json (layers, vocabulary, hidden size). Loaders fail or leave layers random. config.json "
    "belongs to another model, or shards are missing.",
    "HF030": "There is no tokenizer (tokenizer.json, tokenizer.model, vocab.json with merges.txt, or vocab.txt). The model cannot "
    "take text; a converted file would have none either. Copy it from the original model.",
    "HF031": "A tokenizer file or another JSON file beside the weights cannot be read as strict JSON. Download it again.",
    "HF040": "A link that leaves the folder (links into the blobs of the same hub cache are fine). Following it opens a file of "
    "your machine. Copy the file into the folder.",
    "HF041": "A file of the model is no regular file that can be opened. Replace it.",
    "HF050": "pytorch_model.bin asks for more than a state dict needs, or is broken. It may run code when loaded with other tools: "
    "do not load it. polyquant has executed nothing.",
    "HF051": "Weights are stored as pickle. polyquant reads them without executing anything; other tools may not. Convert to "
    "safetensors.",
    "HF052": "pytorch_model.bin is sound as far as it can be told, but of a kind that is not read here (from before torch 1.6, "
    "big-endian, or holding more than tensors). Save the state dict again with a newer torch, best as safetensors.",
    "HF060": "config.json says packed BitNet, and a packed weight has no usable weight_scale: missing, not one float, not "
    "finite or zero. The layer decodes to nonsense. Convert the model again from its master weights.",
    "HF061": "config.json names a quantization method that polyquant does not decode. Its packed integers, or floats without their scales, look like weights "
    "but are none: `inspect` shows them as they are stored, and everything else refuses the folder. Start from the float model, or dequantize it with the "
    "method's own tool. As a warning: no weight is quantized in the way that config.json says.",
    "HF062": "An EXL3 weight lacks a tensor (trellis, suh, svh), or they do not fit together: I16 [K / 16, N / 16, 16 x bits] beside F16 [K] and "
    "F16 [N], multiples of 128. The layer cannot be decoded. Take the file from its source again.",
    "HF063": "A weight of a quantized checkpoint (GPTQ, AWQ, compressed-tensors, FP8, ChatGLM) lacks a tensor, or its tensors do not fit together: the words of "
    "the codes, the zeros and the scales must say the same rows, columns and groups. The layer cannot be decoded. Finish the download, or quantize again "
    "(an old export of msModelSlim cuts off qzeros where the rows are no multiple of 32).",
    "HF064": "Scales of a quantized weight hold NaN or infinity. The layer decodes to nonsense, and spreads it to every later token. Quantize again.",
    "HF065": "Tensors are codes of a quantization (integers where weights should be, 8-bit floats with scales beside them), and config.json does not describe it. "
    "Without the description they cannot be decoded: `inspect` shows them as they are stored, and everything else refuses them. Often a key of config.json was "
    "lost, or one file of a folder was opened alone: take config.json from the source again, or open the folder.",
}
