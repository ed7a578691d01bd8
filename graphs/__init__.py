"""What a graph is: contract, builders, artifact reader and writer, and rewriting passes."""
