"""The transformer of the Llama and Qwen families."""
