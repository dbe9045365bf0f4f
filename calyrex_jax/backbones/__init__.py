"""One decoder for the llama, qwen2, mistral and gpt2 families, described by a frozen spec."""
