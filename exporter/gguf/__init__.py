"""GGUF files, llama.cpp's, as a source of export."""
