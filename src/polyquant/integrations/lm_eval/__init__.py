"""EleutherAI's lm-evaluation-harness on any checkpoint that runs here: model name `polyquant`.

    lm_eval --model polyquant --model_args pretrained=model.gguf --tasks hellaswag

The harness finds the class by our entry point in its group `lm_eval.models`, which releases after 0.4.13 look for. With 0.4.13 and any later
one the same arguments work behind

    python -m polyquant.integrations.lm_eval

which registers the class and hands over to the harness. From Python: import polyquant.integrations.lm_eval.model first.
"""
