"""The finding codes of a conversion certificate."""

from __future__ import annotations

__all__ = ["CODES"]

CODES = {
    "CER001": "A tensor of the source is missing in the target. Runtimes refuse such a file, or compute without the"
    " tensor (a bias). Convert again.",
    "CER002": "The target has a tensor that the source does not have. llama.cpp refuses files with unknown tensors;"
    " others add a bias or a norm that the model does not have.",
    "CER003": "A tensor has another shape than the source's values. Usually other hyper-parameters, another model, "
    "or padding.",
    "CER004": "A tensor of the target contains NaN or infinity where the source does not: a broken scale, or an "
    "overflow of float16.",
    "CER005": "A tensor's type cannot be decoded, so its values were not compared, and nothing is certified.",
    "CER010": "A tensor's values are not those of the source, and no known mistake explains them. The error is "
    "larger than the target's codec causes.",
    "CER011": "Experts are exchanged: a stack holds the matrices of the source in another order. The router then "
    "selects wrong experts, and the text is fluent but poor.",
    "CER012": "A tensor holds the values of another tensor of the source, such as k in place of q. The message "
    "names the rows or the columns, and the tensor whose values are there.",
    "CER013": "Gate and up projections are exchanged, or the halves of the tensor that holds both. The activation "
    "is then applied to the wrong half.",
    "CER014": "The layers of the target are in another order than those of the source.",
    "CER015": "Rotary rows are in the wrong order. Hugging Face rotates the two halves of a head, llama.cpp's llama"
    " adjacent pairs: converters permute q and k. Here the permutation is missing, applied twice, or "
    "applied to a model without it.",
    "CER016": "Heads are in another order than in the source: whole blocks of head_dim rows are exchanged.",
    "CER017": "Rows are in another order than in the source: exchanged, shifted or permuted. In an embedding or a "
    "head tokens get the vectors of others, in a router experts get the scores of others.",
    "CER018": "A matrix is transposed. Only square matrices can be transposed unnoticed; the shape of others shows it.",
    "CER019": "A part of a tensor holds values of another tensor of the source. The message names the rows or the "
    "columns, and the tensor whose values are there.",
    "CER020": "Values are zero that are not zero in the source.",
    "CER021": "Values have the opposite sign.",
    "CER022": "Values have the right direction and a wrong size: a scale was lost, doubled, or applied twice.",
    "CER023": "A norm is shifted by a constant. Gemma and others store weight - 1 in Hugging Face folders and "
    "weight in GGUF; here the 1 was added twice or not at all.",
    "CER024": "The error is larger than the tensor's codec causes, but the values are correlated with the source: "
    "they were quantized with fewer bits first and then stored in this codec.",
    "CER025": "The values are right if their bytes are read as another float type or in the other byte order.",
    "CER026": "Ternary values are right if the symbols of their codes are read in another order: the file was "
    "written in another layout (I2_S of bitnet.cpp or of Trinity) than the one it is read in.",
    "CER027": "The static activation parameters of a quantized linear layer contradict its weight: deq_scale, "
    "quant_bias and input_offset do not fit each other. Runtimes that use integer products compute other "
    "outputs.",
    "CER028": "The output head is wrong: the source has a separate head and the target uses the embedding, or the "
    "reverse.",
    "CER029": "A change of values that the conversion requires was not made: the tensor holds the source's values "
    "as they are, such as the logarithm of a state space's decay.",
    "CER030": "The target declares another architecture than the source translates to.",
    "CER031": "A size differs: layers, width, heads, key/value heads, head size, vocabulary, context.",
    "CER032": "The epsilon of the norms differs.",
    "CER033": "RoPE differs: base, scaling, the number of rotated dimensions or the layers that rotate. Short texts"
    " may look right.",
    "CER034": "Attention differs: sliding windows, soft caps, scales, temperature.",
    "CER035": "Expert routing differs: the number of experts, how many are used, gating, normalization, scale, groups.",
    "CER036": "The activation function differs.",
    "CER037": "A multiplier of embeddings, residuals or logits differs.",
    "CER038": "Another entry of the configuration or of the metadata differs.",
    "CER039": "The configuration of a checkpoint cannot be read, so hyper-parameters were not compared.",
    "CER040": "The tokens of the vocabulary differ, or their order. Every text is encoded to other ids.",
    "CER041": "The merges or the scores differ: text is split into other tokens.",
    "CER042": "The id of a special token differs: bos, eos, eot, pad, unk, ... Generation may not end, or prompts "
    "start with the wrong token.",
    "CER043": "The type of a token differs: control, user-defined, byte. A chat template's markers are then encoded"
    " as plain text, or printed.",
    "CER044": "Words are split or normalized differently before the merges: another pre-tokenizer.",
    "CER045": "bos or eos is added to the input by one side only.",
    "CER046": "The chat template differs.",
    "CER047": "One side has no tokenizer, or one of another kind, or one that cannot be read.",
    "CER048": "The two tokenizers encode the same text to different ids.",
    "CER050": "The logits differ by more than the errors of the weights explain, although the tensors agree.",
    "CER051": "The logits were not compared. The message gives the reason.",
    "CER060": "Smoothing was applied: a norm, or the rows of a matrix, are divided by factors by which the columns "
    "of the next matrices are multiplied. The model computes the same.",
    "CER061": "The target stores something in another form that computes the same: a tied head as a separate "
    "tensor, an equivalent pre-tokenizer, a tensor that runtimes compute.",
    "CER062": "The target's format cannot express a property of the source, so that no conversion to it computes "
    "the same in every case: a sliding window, a RoPE scaling beyond the context. The message names it.",
}
