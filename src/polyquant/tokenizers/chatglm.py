"""The special tokens of ChatGLM2 and ChatGLM3, which are numbered in tokenization_chatglm.py and listed in no file.

Source: tokenization_chatglm.py of THUDM/chatglm2-6b and THUDM/chatglm3-6b.
"""

__all__ = ["LETTERS", "MODEL_TYPE", "PREFIX", "SPECIAL"]

MODEL_TYPE = "chatglm"
SPECIAL = ("[MASK]", "[gMASK]", "[sMASK]", "sop", "eop")
"""Tokens that tokenization_chatglm.py numbers after the pieces of tokenizer.model (ChatGLM3 lists more in
tokenizer_config.json)."""
LETTERS = ("sop", "eop")
PREFIX = ("[gMASK]", "sop")
"""Tokens before every input."""
