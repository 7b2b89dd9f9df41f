"""`polyquant browse`: tensors, metadata, tokenizer, chat template and findings of models in a terminal (Textual).

listing.py, columns.py, details.py and paging.py hold plain data and are imported without Textual; the other modules are
widgets. Reading happens in threads (jobs.py), so the screen never waits for a file or a server.
"""
