"""The parts of a conversion certificate (analysis/certify.py): tensors, hyper-parameters, tokenizers, logits."""
