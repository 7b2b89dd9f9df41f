"""EleutherAI's lm-evaluation-harness on any supported checkpoint: model name `polyquant`.

    lm_eval --model polyquant --model_args pretrained=model.gguf --tasks hellaswag

The harness finds the class through our entry point in its group `lm_eval.models`, supported by releases after 0.4.13.
With 0.4.13 and later, the same arguments work with

    python -m polyquant.integrations.lm_eval

which registers the class and starts the harness. From Python: import polyquant.integrations.lm_eval.model first.
"""
