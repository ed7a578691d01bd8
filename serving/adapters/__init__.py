"""LoRA adapters: read from PEFT's folders, checked against the model, kept in its slots."""
