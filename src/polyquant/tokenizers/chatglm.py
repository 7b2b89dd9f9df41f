"""The special tokens of ChatGLM2 and ChatGLM3, which tokenization_chatglm.py numbers and no file lists.

Source: tokenization_chatglm.py of THUDM/chatglm2-6b and THUDM/chatglm3-6b.
"""

__all__ = ["LETTERS", "MODEL_TYPE", "PREFIX", "SPECIAL"]

MODEL_TYPE = "chatglm"
SPECIAL = ("[MASK]", "[gMASK]", "[sMASK]", "sop", "eop")
"""Tokens that tokenization_chatglm.py numbers after the pieces of tokenizer.model (ChatGLM3 names its own in tokenizer_config.json)."""
LETTERS = ("sop", "eop")
PREFIX = ("[gMASK]", "sop")
"""In front of every text."""
