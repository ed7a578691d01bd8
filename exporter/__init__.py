"""Export: a Hugging Face checkpoint becomes an artifact. See `export.export_model`."""
